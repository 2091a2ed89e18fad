"""Collectives between processes: a program on the CPU calls their kernels.

That is what they are, and no want of a lowering: strict mode has nothing against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.host_call import emit_call
from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.collectives import COLLECTIVES

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _call(name: str) -> Callable[..., list[Any]]:
    def lower(b: Builder, *args: Any) -> list[Any]:
        return emit_call(b, name, args)

    return lower


for _name in COLLECTIVES:
    rule(f"lazyxla_c10d::{_name}", platforms=("cpu",))(_call(f"lazyxla_c10d::{_name}"))
