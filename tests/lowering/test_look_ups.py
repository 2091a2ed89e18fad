"""Look-ups, which TPUs do one by one: short rows are compared instead, windows are slices."""

import math

import pytest
import torch

from lazyxla.lowering import Geometry, Node, Program, Ref, TensorSpec, lower_to_text
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.value import Value
from tests.lowering.bench import Bench
from tests.lowering.harness import execute, record

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "of_index", "dim"),
    [
        ((300, 8), (300, 5), 1),
        ((8, 300), (5, 300), 0),
        ((7, 11, 30), (6, 9, 30), 1),  # fewer rows than there are
        ((512,), (1024,), 0),
    ],
)
def test_short_rows(
    sizes: tuple[int, ...], of_index: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    x = (torch.randn(sizes) * 3).to(dtype)
    if dtype.is_floating_point:
        x.view(-1)[:4] = torch.tensor([-0.0, math.inf, math.nan, -math.inf])
    recorded = record("aten::gather", x, dim, torch.randint(0, sizes[dim], of_index))
    for platform, looks_up in (("tpu", False), ("cpu", True), ("cuda", True)):
        assert ("gather" in lower_to_text(recorded.program, platform)) == looks_up
        [got], _ = execute(recorded.program, recorded.inputs, platform)
        [expected] = recorded.expected
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point:
            known = ~expected.isnan()  # nothing is said of the sign of nan
            assert torch.equal(got.signbit()[known], expected.signbit()[known])


@pytest.mark.parametrize(
    ("sizes", "of_index", "dtype"),
    [
        ((4, 513), (4, 400), torch.float32),  # a longer row
        ((4, 8), (4, 8), torch.float32),  # few
        ((300, 8), (300, 5), torch.float64),
        ((300, 8), (300, 5), torch.complex64),
    ],
)
def test_what_is_looked_up(
    sizes: tuple[int, ...], of_index: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, index = torch.randn(sizes).to(dtype), torch.randint(0, sizes[1], of_index)
    recorded = record("aten::gather", x, 1, index)
    assert "gather" in lower_to_text(recorded.program, "tpu")


def test_indices_out_of_range_are_the_nearest_in_range() -> None:
    """As for every gather: there is no check, which would need the values."""
    x = torch.randn(300, 8)
    recorded = record("aten::gather", x, 1, torch.zeros(300, 5, dtype=torch.int64))
    index = torch.randint(-20, 20, (300, 5))
    for platform in ("cpu", "tpu"):
        [got], _ = execute(recorded.program, [x, index], platform)
        assert torch.equal(got, x.gather(1, index.clamp(0, 7)))


TABLES = [
    ((32, 8), (40, 40), 0),
    ((300,), (2000,), 0),
    ((3, 32, 5), (30, 40), 1),
    ((4, 16), (1200,), -1),
]


def bits(x: torch.Tensor) -> torch.Tensor:
    """One pattern for all nans: PyTorch's differ by its version."""
    integers = x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])
    return integers.masked_fill(x.isnan(), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("sizes", "of_index", "dim"), TABLES)
def test_small_tables(
    sizes: tuple[int, ...],
    of_index: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    bench: Bench,
) -> None:
    x = torch.randn(sizes).to(dtype)
    x.view(-1)[:6] = torch.tensor([-0.0, math.inf, math.nan, -math.inf, 1e-40, -1.5])
    index = torch.randint(-3, sizes[dim] + 3, of_index)  # some out of range

    def rule(b: Builder, x: Value, index: Value) -> Value:
        return b.take(x, index, dim)

    clamped = index.clamp(0, sizes[dim] - 1).reshape(-1)
    at = dim % x.dim()
    expected = x.index_select(at, clamped).reshape([*sizes[:at], *of_index, *sizes[at + 1 :]])
    program = bench.program(rule, (x, index), [expected])
    for platform, looks_up in (("tpu", False), ("cpu", True)):
        assert ("gather" in lower_to_text(program, platform)) == looks_up
        [got], _ = execute(program, [x, index], platform)
        assert torch.equal(bits(got), bits(expected))


@pytest.mark.parametrize(
    ("sizes", "count"), [((513, 8), 2000), ((32, 8), 1000), ((32, 65), 2000), ((0, 8), 0)]
)
def test_tables_that_are_looked_up(sizes: tuple[int, ...], count: int, bench: Bench) -> None:
    def rule(b: Builder, x: Value, index: Value) -> Value:
        return b.take(x, index, 0)

    inputs = torch.randn(sizes), torch.zeros(count, dtype=torch.int64)
    program = bench.program(rule, inputs, [torch.zeros(count, sizes[1])])
    assert "dot_general" not in lower_to_text(program, "tpu")


WINDOWS = [
    # The sizes of what is viewed; size and step of the windows over its last dimension; its slices.
    ((8, 3280), 80, 32, 3),
    ((3, 50), 16, 1, 16),
    ((3, 50), 7, 7, 0),  # which do not overlap
    ((200,), 25, 10, 3),
    ((3, 600), 64, 1, 0),  # too many
    ((2, 100, 3), 2, 1, 2),
]


def read(x: torch.Tensor, view: torch.Tensor) -> Program:
    geometries = [
        Geometry(t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in (x, view)
    ]
    spec, result = TensorSpec(x.dtype, tuple(x.shape)), TensorSpec(x.dtype, tuple(view.shape))
    return Program(
        [spec], [Node("lazyxla::view", (Ref(0), *geometries), (result,))], [Ref(1)], [], {}
    )


@pytest.mark.parametrize(("sizes", "size", "step", "slices"), WINDOWS)
def test_windows(sizes: tuple[int, ...], size: int, step: int, slices: int) -> None:
    x = torch.randn(sizes)
    view = x.unfold(-1, size, step)
    views = [view, view.transpose(-1, -2), view[..., 1:, :], view[..., ::2], view[..., 1:, 3:].mT]
    for each in views if slices else [view]:
        program = read(x, each)
        for platform in ("cpu", "tpu"):
            [got], _ = execute(program, [x], platform)
            assert torch.equal(got, each)
        text = lower_to_text(program, "tpu")
        assert ("gather" in text) == (slices == 0 and step < size)
    assert lower_to_text(read(x, view), "tpu").count("concatenate") == (slices > 0)


def test_windows_over_a_dimension_of_blocks() -> None:
    """What is spread out in one dimension, as in the gradient of frames."""
    x = torch.randn(8 * 410)
    view = x.as_strided((8, 11, 100), (410, 31, 1))
    assert "gather" not in lower_to_text(read(x, view), "tpu")
    for platform in ("cpu", "tpu"):
        [got], _ = execute(read(x, view), [x], platform)
        assert torch.equal(got, view)


@pytest.mark.parametrize("strides", [(2, 2), (3, 2), (1, 1), (5, 2), (4, 2)])
def test_windows_of_any_steps(strides: tuple[int, int]) -> None:
    x = torch.randn(3, 90)
    for sizes in ((5, 9), (9, 5), (3, 20)):
        view = x.as_strided((3, *sizes), (90, *strides), 7)
        [got], _ = execute(read(x, view), [x], "tpu")
        assert torch.equal(got, view)
