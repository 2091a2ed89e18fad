"""Operators that set how values are spread over many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.partition import constrained
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


@rule("lazyxla::constrain")
def constrain(b: Builder, x: Value, sharding: str) -> Value:
    return constrained(x, b.annotations, sharding)
