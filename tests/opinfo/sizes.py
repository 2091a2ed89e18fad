"""Samples with sizes of 0 and 1 and with empty lists, for the part "sizes" of the sweep.

The device must raise an error of the type that the CPU raises, at the call, or give the CPU's
result. Recording a call compiles nothing, so errors, dtypes, shapes and strides come first, and
only results with elements are then read, many of them from one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import (
    keystr,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

Change = Callable[[torch.Tensor], torch.Tensor]


# PyTorch's CPU kernels read beyond the end of tensors whose sizes do not fit, and may crash.
_UNCHECKED = (
    *("_batch_norm_with_update", "_native_batch_norm_legit", "native_batch_norm", "lu_unpack"),
    "_segment_reduce",
)
# These crash even if all sizes fit.
_CRASHING = ("linalg.lstsq", "nn.functional.embedding_bag")


def resized(samples: Iterable[SampleInput], name: str) -> Iterator[SampleInput]:
    """The samples of an operator with each size of each tensor 0 and 1, and with each list emptied.

    A size is changed in one tensor alone and in all that have it, which keeps most calls valid.
    """
    for sample in samples if name not in _CRASHING else ():
        seen = {_signature(sample)}
        lists = () if name in _UNCHECKED else _emptied_lists(sample)
        for variant in (*_other_sizes(sample, alone=name not in _UNCHECKED), *lists):
            if (signature := _signature(variant)) not in seen:
                seen.add(signature)
                yield variant


def tensors(sample: SampleInput) -> list[torch.Tensor]:
    """All of its tensors, in the order of its arguments."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _other_sizes(sample: SampleInput, alone: bool) -> Iterator[SampleInput]:
    given = tensors(sample)
    for size in dict.fromkeys(n for x in given for n in x.shape):
        for new in {0, 1} - {size}:
            dims = [[d for d, n in enumerate(x.shape) if n == size] for x in given]
            yield _changed(sample, dims, new)
            for position, own in enumerate(dims if alone else []):
                for dim in own:
                    one = [[dim] if i == position else [] for i in range(len(given))]
                    yield _changed(sample, one, new)


def _changed(sample: SampleInput, dims: list[list[int]], size: int) -> SampleInput:
    """The sample with dimensions, some of each tensor, of another size."""
    numbers = iter(dims)

    def change(x: torch.Tensor) -> torch.Tensor:
        own = next(numbers)
        shape = [size if d in own else n for d, n in enumerate(x.shape)]
        if any(new > old for new, old in zip(shape, x.shape, strict=True)):
            return x.new_zeros(shape)
        for dim in own:
            x = x.narrow(dim, 0, size)
        # Places in what has one element are 0, and are none in what has none.
        return torch.zeros_like(x) if x.dtype is torch.int64 and size == 1 else x.clone()

    return _mapped(sample, change)


def _mapped(sample: SampleInput, change: Change) -> SampleInput:
    trees = (sample.input, sample.args, sample.kwargs)
    first, args, kwargs = tree_map_only(torch.Tensor, lambda x: change(x.detach()), trees)
    return _sample(sample, first, args, kwargs)


def _sample(sample: SampleInput, first: Any, args: Any, kwargs: Any) -> SampleInput:
    return SampleInput(
        first,
        args=args,
        kwargs=kwargs,
        output_process_fn_grad=sample.output_process_fn_grad,
        broadcasts_input=sample.broadcasts_input,
    )


def _is_list(x: Any) -> bool:
    """Numbers or tensors, one at least."""
    return (
        isinstance(x, (list, tuple))
        and len(x) > 0
        and (all(type(n) is int for n in x) or all(isinstance(n, torch.Tensor) for n in x))
    )


@dataclass(frozen=True)
class Replacement:
    """A leaf of a sample's arguments, and how to make the sample with another in its place."""

    path: str
    leaf: Any
    replaced: Callable[[Any], SampleInput]


def replacements(
    sample: SampleInput, is_leaf: Callable[[Any], bool] | None = None
) -> Iterator[Replacement]:
    """All leaves of its arguments."""
    # A dict, since the arguments as a list could be tensors or numbers only.
    arguments = dict(enumerate([sample.input, *sample.args]), **sample.kwargs)
    leaves, spec = tree_flatten_with_path(arguments, is_leaf=is_leaf)
    for position, (path, leaf) in enumerate(leaves):

        def replaced(new: Any, position: int = position) -> SampleInput:
            others = [new if i == position else x for i, (_, x) in enumerate(leaves)]
            first, *rest = tree_unflatten(others, spec).values()
            args, values = rest[: len(sample.args)], rest[len(sample.args) :]
            kwargs = dict(zip(sample.kwargs, values, strict=True))
            return _sample(sample, first, tuple(args), kwargs)

        yield Replacement(keystr(path), leaf, replaced)


def _emptied_lists(sample: SampleInput) -> Iterator[SampleInput]:
    for place in replacements(sample, is_leaf=_is_list):
        if _is_list(place.leaf):
            yield place.replaced(type(place.leaf)())


def _signature(sample: SampleInput) -> str:
    def described(x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(x.shape), x.dtype

    trees = (sample.input, sample.args, sample.kwargs)
    return str(tree_map_only(torch.Tensor, described, trees))
