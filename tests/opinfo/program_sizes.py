"""How many operators the programs of a call have, in two sizes of its arguments.

A rule whose loop runs over elements, steps or taps makes a program that grows with them: what runs
fast in a test with small tensors takes a minute to compile in a model. Nothing is compiled or run
here: a sample of PyTorch's table is made larger, recorded with its gradients and lowered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import lazyxla
from tests.opinfo.entries import samples

# Rules have forms for few elements, up to 64: both are beyond these.
FACTORS = (40, 160)
_SAMPLES = 4
_MOST_ELEMENTS = 1 << 31
# What takes log(n) rounds has a quarter more of them; and the form may be another one.
_MORE = 1.5
_FEW = 8


def growing(op: OpInfo, factors: tuple[int, int] = FACTORS) -> tuple[list[str], int]:
    """The calls of an entry whose programs grow with their sizes, in words, and how many calls were
    lowered in both sizes, `factors` times those of the samples."""
    found: list[str] = []
    lowered = 0
    for sample in itertools.islice(samples(op, torch.float32, _SAMPLES), _SAMPLES):
        for what, enlarged in _variants(sample):
            first, second = (_operators(op, enlarged(factor)) for factor in factors)
            if first is None or second is None or first.results != second.results:
                continue
            lowered += 1
            small, large = first.operators, second.operators
            if large > _MORE * small + _FEW:
                found.append(
                    f"{what}: {small} operators, {large} in the larger size; {_text(sample)}"
                )
    return found, lowered


def _variants(sample: SampleInput) -> Iterator[tuple[str, Callable[[int], Any]]]:
    """Ways to enlarge a sample: a size wherever it occurs, in shapes, in numbers or in both, and
    all sizes at once."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    in_shapes = {n for x in leaves if isinstance(x, torch.Tensor) for n in x.shape if n > 1}
    in_numbers = {x for x in leaves if type(x) is int and 1 < x < 100}

    def enlarge(shapes: set[int], numbers: set[int], factor: int) -> Any:
        def changed(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                shape = [n * factor if n in shapes else n for n in x.shape]
                return torch.empty(shape, dtype=x.dtype, device="meta")
            return x * factor if type(x) is int and x in numbers else x

        return tree_unflatten([changed(x) for x in leaves], spec)

    choices = [
        (shapes, numbers)
        for n in sorted(in_shapes | in_numbers)
        for shapes, numbers in (({n}, set()), (set(), {n}), ({n}, {n}))
        if shapes <= in_shapes and numbers <= in_numbers
    ]
    choices += [(in_shapes, set()), (in_shapes, in_numbers)]
    seen = []
    for shapes, numbers in choices:
        if (shapes, numbers) not in seen and (shapes or numbers):
            seen.append((shapes, numbers))
            yield (
                f"sizes {sorted(shapes)} and numbers {sorted(numbers)} larger",
                lambda factor, s=shapes, n=numbers: enlarge(s, n, factor),
            )


class _Size(NamedTuple):
    operators: int
    results: int


def _operators(op: OpInfo, arguments: Any) -> _Size | None:
    """The size of a call's program, with the gradients of all its inputs; None for what is no call,
    or has no program of its own."""
    made = 0
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    if not tensors or any(math.prod(x.shape) > _MOST_ELEMENTS for x in tensors):
        return None

    def call(first: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
        nonlocal made
        leaves, spec = tree_flatten((first, args, kwargs))
        inputs = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and op.supports_autograd:
                leaves[position] = leaf.detach().requires_grad_()
                inputs.append(leaves[position])
        first, args, kwargs = tree_unflatten(leaves, spec)
        results = [
            x for x in tree_leaves(op(first, *args, **kwargs)) if isinstance(x, torch.Tensor)
        ]
        ends = [x for x in results if x.requires_grad]
        if ends and inputs:
            seeds = [torch.ones_like(x) for x in ends]
            found = torch.autograd.grad(ends, inputs, seeds, allow_unused=True)
            results += [x for x in found if x is not None]
        made = len(results)
        return results

    try:
        text = lazyxla.stablehlo(call, *arguments)
    except Exception:  # sizes that do not fit, values that are read, operators of the host
        return None
    return _Size(text.count("stablehlo."), made)


def _text(sample: SampleInput) -> str:
    def short(x: Any) -> Any:
        return tuple(x.shape) if isinstance(x, torch.Tensor) else x

    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    return str(tree_unflatten([short(x) for x in leaves], spec))
