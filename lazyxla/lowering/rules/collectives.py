"""Collectives between processes (csrc/distributed/collectives.h), which only the CPU has: see
lowering/cpu/collectives.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.registry import rule

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

COLLECTIVES = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    *("send", "start_receive", "finish_receive"),
)
"""Their names in the namespace lazyxla_c10d."""


def _refuse(name: str) -> Callable[..., Any]:
    def lower(b: Builder, *_: Any) -> Any:
        raise LoweringError(
            f"{name}: torch.distributed works between processes on the CPU, not on {b.platform}"
        )

    return lower


for _name in COLLECTIVES:
    rule(f"lazyxla_c10d::{_name}")(_refuse(f"lazyxla_c10d::{_name}"))
