"""Collectives between processes that have devices of the CPU each: a program calls their kernels.

That is what they are, and no want of a lowering: strict mode has nothing against it. A program that
the processes run together has XLA's collectives, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lazyxla.lowering.host_call import emit_call
from lazyxla.lowering.registry import find_rule, rule
from lazyxla.lowering.rules.collectives import MESSAGES, SHARED

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


def _call(name: str) -> Callable[..., list[Any]]:
    def lower(b: Builder, *args: Any) -> list[Any]:
        if b.groups and (shared := find_rule(name)):
            return shared(b, *args)  # type: ignore[no-any-return]
        b.host_calls.append(name)
        return emit_call(b, name, args, b.outputs)

    return lower


for _name in (*SHARED, *MESSAGES):
    rule(f"lazyxla_c10d::{_name}", platforms=("cpu",))(_call(f"lazyxla_c10d::{_name}"))
