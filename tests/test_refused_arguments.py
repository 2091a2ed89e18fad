"""Sizes, dimensions, dtypes and words that PyTorch's CPU refuses are refused at the call, in its
words. Nothing is read here: an error that came with the results would be missed.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import DEVICE, error_of

Call = Callable[[str], Any]


def _refused(calls: dict[Any, Call]) -> int:
    """How many calls are refused: on the device as on the CPU."""
    expected = {name: error_of(call, "cpu") for name, call in calls.items()}
    for name, call in calls.items():
        assert error_of(call, DEVICE) == expected[name], name
    return sum(kind is not type(None) for kind, _ in expected.values())


def _ones(d: str, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(sizes, dtype=dtype).to(d)


def _index(d: str, *values: float) -> Tensor:
    return torch.tensor(values).to(d)


def _convolution(transposed: bool, dims: int, dtype: torch.dtype, numbers: dict[str, Any]) -> Call:
    f = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")

    def call(d: str) -> Tensor:
        weight = _ones(d, 2, 2, *[2] * dims, dtype=dtype)
        return f(_ones(d, 1, 2, *[5] * dims, dtype=dtype), weight, **numbers)

    return call


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions(transposed: bool, dims: int) -> None:
    numbers: list[dict[str, Any]] = [
        {name: value}
        for name in ("dilation", "stride", "padding", "groups")
        for value in (-1, 0, 1, 9, (1,) * (dims + 1), (1,) * (dims - 1) + (0,))
        if name != "groups" or isinstance(value, int)
    ]
    numbers += [{"dilation": 0, "stride": s} for s in (0, 2)]
    numbers += [{"padding": p} for p in (3, 4, 5)]
    if transposed:
        numbers += [{"output_padding": p, "stride": s} for p in (-1, 1, 2, 3) for s in (1, 2)]
    else:
        numbers += [{"padding": "same", name: n} for name in ("dilation", "stride") for n in (0, 2)]
    dtypes = (torch.float32, torch.float64, torch.complex64)
    tried = product(range(len(numbers)), dtypes)
    calls = {
        (str(numbers[i]), dtype): _convolution(transposed, dims, dtype, numbers[i])
        for i, dtype in tried
    }
    assert _refused(calls) > 40


def _resampled(mode: str, sizes: tuple[int, ...], numbers: dict[str, Any]) -> Call:
    return lambda d: F.interpolate(_ones(d, 1, 2, *sizes), mode=mode, **numbers)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_resampling(dims: int) -> None:
    modes = ("nearest", "linear", "bilinear", "bicubic", "trilinear", "nearest-exact", "area")
    numbers: list[dict[str, Any]] = [
        *({"size": size} for size in (0, -1, 3, (3,) * (dims - 1) + (0,))),
        *({"scale_factor": factor} for factor in (0.0, 0.1, -1.0)),
        {"size": 0, "antialias": True},
    ]
    calls = {
        (mode, size, str(each)): _resampled(mode, (size,) * dims, each)
        for mode, size, each in product(modes, (0, 4), numbers)
    }
    assert _refused(calls) > 60


def _reduced(self: tuple[int, ...], dim: int, index: Any, source: tuple[int, ...]) -> Call:
    return lambda d: _ones(d, *self).index_reduce(
        dim, torch.tensor(index).to(d), _ones(d, *source), "amax"
    )


@pytest.mark.filterwarnings("ignore:index_reduce")
def test_index_reduce() -> None:
    selves, sources = [(), (5,), (5, 4)], [(), (1,), (2,), (2, 4), (5, 2), (2, 4, 1)]
    indices: list[Any] = [0, (0,), (1, 0), ((1, 0),), (1.0, 0.0), (True,)]
    tried = product(selves, (0, 1, -1, 2), indices, sources)
    assert _refused({each: _reduced(*each) for each in tried}) > 300
    assert _refused(
        {"sum": lambda d: _ones(d, 2).index_reduce(0, _index(d, 0), _ones(d, 1), "sum")}
    )


OTHERS: dict[str, Call] = {
    "cummax": lambda d: torch.cummax(_ones(d), 1),
    "cummin": lambda d: torch.cummin(_ones(d), -3),
    "batch_norm of one dimension": lambda d: F.batch_norm(_ones(d, 6), None, None, training=True),
    "losses of other sizes": lambda d: F.binary_cross_entropy_with_logits(
        _ones(d, 2, 2), _ones(d, 2, 2), _ones(d, 1, 2, 2)
    ),
    "group_norm": lambda d: torch.native_group_norm(
        _ones(d, 1, 2, 3), _ones(d, 2, 1), None, 1, 2, 3, 1, 1e-5
    ),
    "put into nothing": lambda d: _ones(d, 0).put_(_index(d, 0), _ones(d, 1)),
    "ormqr": lambda d: torch.ormqr(_ones(d, 5, 2), _ones(d, 1), _ones(d, 5, 2)),
    "ormqr from the right": lambda d: torch.ormqr(
        _ones(d, 5, 2), _ones(d, 1), _ones(d, 2, 5), left=False
    ),
    "lu": lambda d: torch.linalg.lu(_ones(d, 2, 2), pivot=False),
    "lu_factor_ex": lambda d: torch.linalg.lu_factor_ex(_ones(d, 2, 2), pivot=False),
    "lu_factor of integers": lambda d: torch.linalg.lu_factor(_index(d, 1)[None], pivot=False),
    "searchsorted": lambda d: torch.searchsorted(_index(d, 1), _index(d, 2), side="middle"),
    "searchsorted for a number": lambda d: torch.searchsorted(_index(d, 1), 2, side="middle"),
    "segment_reduce": lambda d: torch.segment_reduce(_ones(d, 2), "any", lengths=_index(d, 2)),
    "segment_reduce by floats": lambda d: torch.segment_reduce(
        _ones(d, 2), "sum", lengths=_index(d, 2.0)
    ),
    "segment_reduce of integers": lambda d: torch.segment_reduce(
        _index(d, 2), "sum", offsets=_index(d, 0, 1)
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    assert _refused({name: OTHERS[name]}) == 1


def test_of_nothing_there_are_no_pivots() -> None:
    assert _refused({"lu": lambda d: torch.linalg.lu(_ones(d, 0, 0), pivot=False)}) == 0
