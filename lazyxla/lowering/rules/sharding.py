"""What says how values are spread over many devices."""

from typing import TYPE_CHECKING, Any

from lazyxla.lowering.partition import constrained
from lazyxla.lowering.registry import rule

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

Value = Any


@rule("lazyxla::constrain")
def constrain(b: "Builder", x: Value, sharding: str) -> Value:
    return constrained(x, b.annotations, sharding)
