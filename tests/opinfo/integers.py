"""Samples with great, small and negative integers, for the part "integers" of the sweep.

Every integer among an operator's arguments, alone or in a list, takes each of these values in turn.
The device must then do as the CPU does; see sizes.py. Left out is what would need much memory, on
the CPU too: what a call makes on its way is told by making it on the meta device first.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.opinfo.sizes import replacements, tensors

EXTREMES = (2**31, 2**31 - 1, 2**32, 2**63 - 1, -1, -(2**31), -(2**63))

MOST_ELEMENTS = 1 << 20
"""Of a tensor that a call makes, results included; its memory has as many float64 numbers."""

_MOST_MEMORY = 2 << 30
"""Bytes that a call may take in this process: what kernels make is not told beforehand."""

# The greatest integers, and with a minus the least, that PyTorch's CPU is given: with greater ones
# it takes memory for as many tensors, or does not end.
_MOST = {
    "combinations": MOST_ELEMENTS,
    "linalg.matrix_power": 2**63 - 1,
    "mvlgamma": MOST_ELEMENTS,
    "nn.functional.fractional_max_pool3d": 2**32,
    "tensor_split": MOST_ELEMENTS,
}


def with_integers(samples: Iterable[SampleInput], name: str) -> Iterator[SampleInput]:
    """The first of the samples that has an integer at a place, with others in its stead."""
    seen: set[str] = set()
    most = _MOST.get(name, 2**63)
    for sample in samples:
        given = tensors(sample)
        if any(x.numel() < (2 if x is given[0] else 1) for x in given):
            continue  # of one element or none, most arguments make no difference
        sizes = [n for x in given[:1] for n in x.shape]
        numbers = dict.fromkeys((*EXTREMES, *sizes, *(n + 1 for n in sizes)))
        values = [n for n in numbers if abs(n) <= most]
        places = [p for p in replacements(sample) if type(p.leaf) is int and p.path not in seen]
        for place in places:
            seen.add(place.path)
            yield from (place.replaced(value) for value in values if value != place.leaf)


class _TooLarge(Exception):
    pass


def _is_large(x: torch.Tensor) -> bool:
    return x.numel() > MOST_ELEMENTS or x.untyped_storage().nbytes() > 8 * MOST_ELEMENTS


class _Bounded(TorchDispatchMode):
    """Ends a call that makes a tensor of too many elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and _is_large(x):
                raise _TooLarge
        return result


def is_affordable(call: Callable[[], Any]) -> bool:
    """Whether no tensor is large that a call on the meta device makes, whatever else it raises."""
    try:
        with _Bounded(), bounded_memory():
            call()
    except _TooLarge:
        return False
    except Exception:
        return True
    return True


@contextmanager
def bounded_memory() -> Iterator[None]:
    """What the process allocates beyond this is an error, for what runs within."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + _MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
