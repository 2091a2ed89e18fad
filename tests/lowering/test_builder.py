"""The builder's conversions, movement, indexing and control flow against PyTorch's counterparts."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from lazyxla.lowering import (
    SlotSpec,
)
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.scalar import Scalar, wrap_number
from tests.lowering.bench import Bench, Rule
from tests.support import DTYPES


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_convert(bench: Bench, target: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, -1.5, 2.7, 100.4, 250.9])
    for source in DTYPES:
        x = values.abs().to(source) if source == torch.uint8 else values.to(source)
        if target == torch.uint8 and source.is_complex:
            x = x.abs().to(source)
        bench.check(lambda b, x: b.convert(x, target), x, expected=x.to(target))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants(bench: Bench, dtype: torch.dtype) -> None:
    for value in (0, 1, 3, True, 2.5, -1.0, -0.0):
        if value == -1.0 and dtype == torch.uint8:
            continue
        expected = torch.full((2, 3), value).to(dtype)
        bench.check(lambda b, v=value: b.constant(v, dtype, (2, 3)), expected=expected)
        bench.check(lambda b, v=value: b.full((2, 3), v, dtype), expected=expected)
    if dtype.is_floating_point:
        special = torch.tensor([float("inf"), -float("inf"), float("nan")], dtype=dtype)
        values = special.tolist()
        one = lambda b: b.concat([b.constant(v, dtype, (1,)) for v in values], 0)  # noqa: E731
        bench.check(one, expected=special)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_array_and_iota(bench: Bench, dtype: torch.dtype) -> None:
    values = [[0, 1, 2], [1, 0, 5]]
    bench.check(lambda b: b.array(values, dtype), expected=torch.tensor(values).to(dtype))
    counted = torch.arange(3).to(dtype).expand(2, 3)
    bench.check(lambda b: b.iota((2, 3), 1, dtype), expected=counted)


def test_extreme_integers(bench: Bench) -> None:
    def ends(b: Builder) -> list[Any]:
        return [b.constant(b.lowest(dtype), dtype), b.constant(b.highest(dtype), dtype)]

    for dtype in (torch.int8, torch.uint8, torch.int64, torch.uint64, torch.uint16):
        limits = torch.iinfo(dtype)
        expected = [torch.tensor(end, dtype=dtype) for end in (limits.min, limits.max)]
        bench.check(ends, expected=expected)


NUMBERS = [True, 2, 2.5, 1j]


def test_result_type(bench: Bench) -> None:
    """A tensor with a tensor, a 0-dim tensor, a 0-dim CPU tensor and a Python number."""
    checked = 0

    def probe(b: Builder, x: Any) -> Any:
        nonlocal checked
        for first, second in itertools.product(DTYPES, DTYPES):
            full = torch.empty(2, dtype=first)
            left = b.zeros((2,), first)
            for right, tensor in [
                (b.zeros((2,), second), torch.empty(2, dtype=second)),
                (b.zeros((), second), torch.empty((), dtype=second)),
                (Scalar(SlotSpec(0, second, False, False)), torch.empty((), dtype=second)),
            ]:
                assert b.result_type(left, right) == torch.result_type(full, tensor)
                assert b.result_type(right, left) == torch.result_type(tensor, full)
                checked += 2
            scalar = torch.empty((), dtype=first)
            for number in NUMBERS:
                assert b.result_type(left, number) == torch.result_type(full, number)
                assert b.result_type(b.zeros((), first), wrap_number(number)) == torch.result_type(
                    scalar, number
                )
                checked += 2
        return x

    x = torch.zeros(1)
    bench.check(probe, x, expected=x)
    assert checked == 12 * 12 * (6 + 8)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((3, 4), (4,)),
        ((3, 1), (1, 4)),
        ((), (2, 3)),
        ((2, 1, 3), (4, 1)),
        ((1,), (1, 1)),
        ((0,), (1,)),
    ],
)
def test_broadcast(bench: Bench, first: tuple[int, ...], second: tuple[int, ...]) -> None:
    x, y = torch.randn(first), torch.randn(second)
    bench.check(lambda b, x, y: b.broadcast(x, y), x, y, expected=torch.broadcast_tensors(x, y))
    two = torch.full(first, 2.0)
    splat = lambda b, y: b.broadcast(b.constant(2.0, torch.float32, first), y)  # noqa: E731
    bench.check(splat, y, expected=torch.broadcast_tensors(two, y))


def test_broadcast_of_unlike_shapes_fails(bench: Bench) -> None:
    x, y = torch.randn(3), torch.randn(4)
    with pytest.raises(RuntimeError, match="do not broadcast"):
        bench.check(lambda b, x, y: b.broadcast(x, y), x, y, expected=[x, y])


def test_scalars_stay_dynamic(bench: Bench) -> None:
    slots = [SlotSpec(2.5, torch.float64, True, True), SlotSpec(3, torch.int64, True, True)]
    outputs = [torch.tensor(2.5), torch.tensor(3, dtype=torch.int8), torch.full((2,), 3)]

    def rule(b: Builder, x: Scalar, n: Scalar) -> list[Any]:
        assert not b.is_const(x)
        assert not b.is_const(n, 3)
        return [b.value(x, torch.float32), b.value(n, torch.int8), b.full((2,), n, torch.int64)]

    bench.check(rule, *slots, expected=outputs)


# ---- movement ----

MATRIX = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda b, x: b.reshape(x, (2, -1)), MATRIX.reshape(2, -1)),
        (lambda b, x: b.swap(x, 0, -1), MATRIX.t()),
        (lambda b, x: b.unsqueeze(x, 0, -1), MATRIX[None, :, :, None]),
        (lambda b, x: b.squeeze(b.unsqueeze(x, 1), 1), MATRIX),
        (lambda b, x: b.slice_dim(x, -1, 1, 6, 2), MATRIX[:, 1:6:2]),
        (lambda b, x: b.select_dim(x, 0, 2), MATRIX[2]),
        (lambda b, x: b.flip(x, [-1]), MATRIX.flip(-1)),
        (lambda b, x: b.stack([x, x], 1), torch.stack([MATRIX, MATRIX], 1)),
        (lambda b, x: b.concat([x, x], -1), torch.cat([MATRIX, MATRIX], -1)),
        (lambda b, x: b.pad(x, [1, 0], [0, -2], value=7), pad(MATRIX, (0, -2, 1, 0), value=7.0)),
        (
            lambda b, x: b.dynamic_slice(x, [b.constant(1, torch.int32), 2], [2, 3]),
            MATRIX[1:3, 2:5],
        ),
        (lambda b, x: b.bitcast(b.bitcast(x, torch.int32), torch.float32), MATRIX),
    ],
)
def test_movement(bench: Bench, function: Rule, expected: Tensor) -> None:
    bench.check(function, MATRIX, expected=expected)


def test_dims(bench: Bench) -> None:
    def probe(b: Builder, x: Any) -> Any:
        assert b.dims(x, None) == b.dims(x, []) == [0, 1]
        assert b.dims(x, [], empty_is_all=False) == []
        assert b.dims(x, -1) == [1]
        assert b.dims(x, [-1, 0]) == [0, 1]
        assert b.dims(b.zeros((), torch.float32), -1) == []
        return x

    bench.check(probe, MATRIX, expected=MATRIX)


# ---- indexing ----


def test_take(bench: Bench) -> None:
    x = torch.randn(4, 5, 6)
    for index in (torch.tensor([3, 0, 0]), torch.tensor([[1, 2], [0, 3]]), torch.tensor(2)):
        for dim in (0, 1, -1):
            expected = x.movedim(dim, 0)[index]
            if index.dim() and dim:
                places = range(index.dim())
                expected = expected.movedim(tuple(places), tuple(dim % 3 + i for i in places))
            bench.check(lambda b, x, i, d=dim: b.take(x, i, d), x, index, expected=expected)


def test_take_and_scatter_along(bench: Bench) -> None:
    x = torch.randn(4, 5)
    for index, dim in [
        (torch.tensor([[0, 3, 1, 2, 2]]), 0),
        (torch.tensor([[0, 3, 1]]), 0),
        (torch.tensor([[0, 4], [1, 1], [2, 3], [0, 0]]), 1),
        (torch.tensor([[0, 4], [1, 2]]), 1),
    ]:
        bench.check(
            lambda b, x, i, d=dim: b.take_along(x, i, d), x, index, expected=x.gather(dim, index)
        )
        source = torch.randn(index.shape)
        bench.check(
            lambda b, x, i, s, d=dim: b.scatter_along(x, i, s, d, "add"),
            x,
            index,
            source,
            expected=x.scatter_add(dim, index, source),
        )


def test_gather_and_scatter_nd(bench: Bench) -> None:
    x = torch.randn(4, 5, 6)
    index = torch.tensor([[[0, 1], [3, 5]], [[2, 2], [0, 1]]])
    first, second = index.unbind(-1)
    expected = x[first, :, second]
    bench.check(lambda b, x, i: b.gather_nd(x, i, [0, 2]), x, index, expected=expected)
    updates = torch.randn(2, 2, 5)
    summed = x.clone().permute(0, 2, 1).contiguous()
    summed.index_put_((first, second), updates, accumulate=True)
    bench.check(
        lambda b, x, i, u: b.scatter_nd(x, i, u, [0, 2], "add"),
        x,
        index,
        updates,
        expected=summed.permute(0, 2, 1),
    )


def test_wrap_index(bench: Bench) -> None:
    index = torch.tensor([0, -1, 4, -5])
    expected = torch.tensor([0, 4, 4, 0])
    bench.check(lambda b, i: b.wrap_index(i, 5), index, expected=expected)


@pytest.mark.parametrize("descending", [False, True])
def test_sort(bench: Bench, descending: bool) -> None:
    nan = float("nan")
    x = torch.tensor([[3.0, nan, 1.0, 3.0], [0.0, -0.0, float("inf"), -2.0]])

    def rule(b: Builder, x: Any) -> Any:
        return b.sort([x, b.iota(b.shape(x), 1, torch.int64)], 1, descending)

    bench.check(rule, x, expected=torch.sort(x, dim=1, descending=descending, stable=True))
    flags = torch.tensor([True, False, True])
    bench.check(
        lambda b, x: b.sort([x], 0, descending), flags, expected=flags.sort(0, descending)[0]
    )


# ---- control flow ----


def test_while_loop(bench: Bench) -> None:
    def power(b: Builder, x: Any) -> Any:
        five = b.constant(5, torch.int32)
        start = b.constant(0, torch.int32)
        one = b.constant(1, torch.int32)
        _, result = b.while_loop(
            lambda i, y: b.compare(i, five, "LT"),
            lambda i, y: [b.hlo.add(i, one), b.hlo.multiply(y, x)],
            start,
            b.full_like(x, 1.0),
        )
        return result

    x = torch.randn(3)
    bench.check(power, x, expected=x**5)


def test_cond(bench: Bench) -> None:
    def absolute(b: Builder, x: Any) -> Any:
        negative = b.compare(x, b.full_like(x, 0), "LT")
        (result,) = b.cond(negative, lambda: [b.hlo.negate(x)], lambda: [x], [(torch.float32, ())])
        return result

    for value in (-2.0, 3.0):
        bench.check(absolute, torch.tensor(value), expected=torch.tensor(abs(value)))
