"""What all pooling operators share: windows over two or three trailing dimensions of an input with
or without a batch dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lazyxla.lowering.registry import rule
from lazyxla.lowering.rules.windows import Window
from lazyxla.lowering.value import Value

F = TypeVar("F", bound=Callable[..., Any])


def for_ranks(name: str, platforms: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Registers a rule with a keyword `rank` for both numbers of spatial dimensions in `name`."""

    def register(function: F) -> F:
        for rank in (2, 3):
            rule(name.format(rank), platforms=platforms)(functools.partial(function, rank=rank))
        return function

    return register


def planes(x: Value, rank: int) -> Value:
    """(..., *sizes) as (1, planes, *sizes) with `rank` trailing sizes."""
    lead, sizes = x.shape[: x.rank - rank], x.shape[x.rank - rank :]
    return x.reshape([1, math.prod(lead), *sizes])


def make_window(
    rank: int, kernel: Sequence[int], stride: Sequence[int], *rest: Sequence[int]
) -> Window:
    """A window of `rank` dimensions, with `rest` padding and, if there is one, dilation; an empty
    stride means the kernel's size.
    """
    kernel = list(kernel) * rank if len(kernel) == 1 else kernel
    padding, dilation = (*rest, [1])[:2]
    return Window.of(kernel, stride or kernel, padding, dilation)


def adaptive_spans(size: int, out: int) -> list[tuple[int, int]]:
    """Start and end of each adaptive window along a dimension: from floor(i * size / out) to
    ceil((i + 1) * size / out).
    """
    return [(i * size // out, -(-(i + 1) * size // out)) for i in range(out)]
