"""Fills of expanded tensors, whose elements share memory: what any of the copies gets, all have."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support import DEVICE

Fill = Callable[[random.Random, str, Tensor], object]


def _mask(r: random.Random, d: str, sizes: tuple[int, ...]) -> Tensor:
    return (
        torch.tensor([r.random() < 0.2 for _ in range(torch.Size(sizes).numel())]).view(sizes).to(d)
    )


def _index(r: random.Random, d: str, size: int) -> Tensor:
    return torch.tensor([r.randrange(-size, size) for _ in range(r.randint(1, 3))]).to(d)


def _masked_fill(r: random.Random, d: str, x: Tensor) -> object:
    sizes = tuple(r.choice([1, size]) for size in x.shape)[r.randint(0, x.dim()) :]
    value = torch.tensor(8.0).to(d) if r.random() < 0.5 else 8.0
    return x.masked_fill_(_mask(r, d, sizes), value)


def _index_fill(r: random.Random, d: str, x: Tensor) -> object:
    dim = r.randrange(-x.dim(), x.dim())
    value = torch.tensor(8.0).to(d) if r.random() < 0.5 else 8.0
    return x.index_fill_(dim, _index(r, d, x.shape[dim]), value)


def _by_mask(r: random.Random, d: str, x: Tensor) -> object:
    first = r.randrange(x.dim())
    masked = x.shape[first : r.randint(first + 1, x.dim())]
    x[(*[slice(None)] * first, _mask(r, d, tuple(masked)))] = 8.0
    return x


def _by_index(r: random.Random, d: str, x: Tensor) -> object:
    indices = [_index(r, d, size)[:1] for size in x.shape]
    indexed = r.randrange(x.dim())
    kept = [i == indexed or r.random() < 0.7 for i in range(x.dim())]
    x[tuple(index if k else slice(None) for index, k in zip(indices, kept, strict=True))] = 8.0
    return x


def _values(r: random.Random, d: str, x: Tensor) -> object:
    """Several values: what is written to an element last, or all of it added up."""
    count, accumulate = r.randint(1, 3), r.random() < 0.5
    indexed = r.sample(range(x.dim()), r.randint(1, x.dim()))
    if accumulate:  # PyTorch's method takes no gaps
        indexed = list(range(len(indexed)))
    indices = tuple(
        torch.tensor([r.randrange(-size, size) for _ in range(count)]).to(d)
        if i in indexed
        else slice(None)
        for i, size in enumerate(x.shape)
    )
    sizes = [r.choice([1, size]) for size in x[indices].shape][r.randint(0, 1) :]
    values = torch.tensor([float(r.randint(20, 90)) for _ in range(torch.Size(sizes).numel())])
    values = values.view(sizes).to(d)
    if accumulate:
        return x.index_put_(indices[: len(indexed)], values, accumulate=True)
    x[indices] = values
    return x


def _threshold(r: random.Random, d: str, x: Tensor) -> object:
    return torch.nn.functional.threshold_(x, 3, 8)


FILLS: dict[str, Fill] = {
    "masked_fill_": _masked_fill,
    "index_fill_": _index_fill,
    "mask": _by_mask,
    "index": _by_index,
    "values": _values,
    "threshold_": _threshold,
}


def _run(fill: Fill, seed: int, d: str) -> tuple[Tensor, Tensor, list[str]]:
    """The memory, what the call returns, and the warnings."""
    r = random.Random(seed)
    base = torch.arange(12.0).to(d).clone()
    sizes = [r.choice([1, 1, 2, 3]) for _ in range(r.randint(1, 3))]
    x = base[: torch.Size(sizes).numel()].view(sizes)
    x = x.expand([3 if size == 1 and r.random() < 0.8 else size for size in sizes])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fill(r, d, x)
    assert result is x
    return base.cpu(), x.cpu(), [str(w.message).split(" (Triggered")[0] for w in caught]


@pytest.mark.parametrize("name", FILLS)
def test_fills(name: str) -> None:
    changed = warned = 0
    for seed in range(40):
        expected = _run(FILLS[name], seed, "cpu")
        result = _run(FILLS[name], seed, DEVICE)
        assert torch.equal(result[0], expected[0]), seed
        assert torch.equal(result[1], expected[1]), seed
        assert result[2] == expected[2], seed
        changed += not torch.equal(expected[0], torch.arange(12.0))
        warned += len(expected[2])
    assert changed > 10
    assert (warned > 10) == (name != "threshold_")


@pytest.mark.filterwarnings("ignore:Use of .* on expanded")
def test_a_mask_of_other_sizes_is_refused() -> None:
    x = torch.ones(1, 2, device=DEVICE).expand(3, 2)
    with pytest.raises(RuntimeError, match=r"must match the size|broadcast"):
        x.masked_fill_(torch.ones(2, 3, device=DEVICE) > 0, 1.0)
    with pytest.raises(RuntimeError, match=r"value tensor of shape \[2, 3\] cannot be broadcast"):
        x.index_put_((torch.tensor([0, 1], device=DEVICE),), torch.ones(2, 3, device=DEVICE))
