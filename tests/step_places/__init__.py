"""Places that the Python code of a step may read a number from, and what may change it there.

For tests of captured steps. A place is made anew for each test. It has ``read(x)``, which returns a
tensor like ``x``, and changes, of which each makes ``read`` return something else, or leaves it as
it is. What a step computes must follow every change at once.
"""

from tests.step_places import (
    common,
    containers,
    functions,
    names,
    objects,
    torch_code,
    torch_state,
)
from tests.step_places.common import PLACES, UNWATCHED, Place

__all__ = ["PLACES", "UNWATCHED", "Place", "reset"]

_MODULES = (containers, names, objects, torch_code, torch_state)  # they register their places


def reset() -> None:
    """Gives global numbers their first values."""
    common.set_scale(1.0)
    functions.set_global(1.0)
    functions.NAMES.update(scale=1.0)
    common.Config.scale = 1.0
