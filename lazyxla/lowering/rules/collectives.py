"""Collectives between processes (csrc/distributed/collectives.h).

On the CPU the program calls their kernels. That is what they are, and no want of a lowering: strict
mode has nothing against it.
"""

from __future__ import annotations

import functools
from typing import Any

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.host_call import emit_call
from lazyxla.lowering.registry import rule

_NAMES = (
    *("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"),
    *("send", "start_receive", "finish_receive"),
)


def _collective(name: str, b: Builder, *args: Any) -> list[Any]:
    if b.platform != "cpu":
        raise LoweringError(
            f"{name}: torch.distributed works between processes on the CPU, not on {b.platform}"
        )
    return emit_call(b, name, args)


for _name in _NAMES:
    rule(f"lazyxla_c10d::{_name}")(functools.partial(_collective, f"lazyxla_c10d::{_name}"))
