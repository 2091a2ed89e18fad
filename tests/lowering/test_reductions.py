"""Reductions, softmax, order statistics and running results."""

import itertools

import pytest
import torch

from lazyxla.lowering import lower_to_text
from tests.lowering.batch import ALL, COMPLEX, FLOATS, INF, INTEGERS, NAN, REAL, Batch, each
from tests.lowering.harness import check, execute, record, text

BOOL = (torch.bool,)


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(
            shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else None
        ).to(dtype)
    low = 0 if dtype == torch.uint8 else -5
    return torch.randint(low, 5, shape, generator=generator).to(dtype)


def with_nan(dtype: torch.dtype) -> torch.Tensor:
    x = values(dtype, 3, 4)
    x[0, 1], x[1, 2], x[1, 3], x[2, 0] = NAN, NAN, -INF, INF
    return x


@pytest.mark.parametrize("op", ["sum", "mean", "nansum"])
def test_sums(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 2, 3, 4)
        batch.add(f"aten::{op}", x)
        name = f"aten::{op}" + {"sum": ".dim_IntList", "mean": ".dim", "nansum": ""}[op]
        for dims, keepdim in itertools.product(([1], [0, -1], [], None), (False, True)):
            # 16-bit results of the CPU's nansum were measured 33 units of the last place off.
            batch.add(name, x, dims, keepdim, rounded_once=op == "nansum")
        batch.add(name, x, [0], dtype=torch.float64)
        batch.add(name, x[0, 0, 0], [0])
        batch.add(name, x[:0], [0])
        if dtype.is_floating_point:
            batch.add(name, with_nan(dtype), [1])

    dtypes = FLOATS + COMPLEX if op == "mean" else FLOATS if op == "nansum" else ALL
    each(dtypes, call)


def test_products() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 2, 3)
        batch.add("aten::prod", x)
        batch.add("aten::prod.dim_int", x, 1)
        batch.add("aten::prod.dim_int", x, -2, True)
        batch.add("aten::trace", values(dtype, 3, 5))

    each(REAL + COMPLEX, call)


@pytest.mark.parametrize("op", ["any", "all"])
def test_any_all(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 4, 3)
        x[0] = 0
        x[:, 0] = 1
        batch.add(f"aten::{op}", x)
        batch.add(f"aten::{op}.dim", x, 1)
        batch.add(f"aten::{op}.dim", x, 0, True)
        batch.add(f"aten::{op}.dims", x, [0, 1])
        batch.add(f"aten::{op}.dims", x, None)
        batch.add(f"aten::{op}", x[:0])
        batch.add("aten::count_nonzero", x)
        batch.add("aten::count_nonzero.dim_IntList", x, [1])

    each(ALL, call)
    batch = Batch()
    batch.add(f"aten::_is_{op}_true", torch.tensor([True, False]))
    batch.check()


@pytest.mark.parametrize("op", ["max", "min"])
def test_extrema(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 5, 4)
        inputs = [x, x.flip(0), x[0, 0]]
        if dtype.is_floating_point:
            inputs.append(with_nan(dtype))
        for t in inputs:
            batch.add(f"aten::{op}", t)
            batch.add(f"aten::a{op}", t)
            batch.add(f"aten::a{op}", t, [-1], True)
            batch.add("aten::aminmax", t)
            batch.add("aten::aminmax", t, dim=0, keepdim=True)
            batch.add(f"aten::{op}.dim", t, 0)
            batch.add(f"aten::{op}.dim", t, -1, True)
            if dtype != torch.bool:
                batch.add(f"aten::arg{op}", t)
                batch.add(f"aten::arg{op}", t, 0)
                batch.add(f"aten::arg{op}", t, -1, True)

    each(REAL + BOOL, call)


def test_moments() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 4, 5)
        for op, correction in itertools.product(
            ("var", "std", "var_mean", "std_mean"), (None, 0, 2.5, 7)
        ):
            batch.add(f"aten::{op}.correction", x, [1], correction=correction)
        batch.add("aten::var.correction", x)
        batch.add("aten::std_mean.correction", x, [0], keepdim=True)
        batch.add("aten::var.correction", x[:1], [0])

    each(FLOATS + COMPLEX, call)


def test_norms() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 4, 5)
        for order in (2, 1, 0, INF, -INF, 3, -0.5):
            batch.add("aten::linalg_vector_norm", x, order)
            batch.add("aten::linalg_vector_norm", x, order, [1], True)
        batch.add("aten::norm.Scalar", x)
        batch.add("aten::norm.ScalarOpt_dim", x, 1, [0])
        batch.add("aten::norm.ScalarOpt_dim", x, None, [0])
        batch.add("aten::linalg__powsum", x, 3, [0])
        batch.add("aten::renorm", x, 2, -1, 1.5)
        if dtype == torch.float32:
            batch.add("aten::norm.ScalarOpt_dtype", x, 2, dtype=torch.float64)
            batch.add("aten::norm.ScalarOpt_dim_dtype", x, 2, [0], True, dtype=torch.float64)
            batch.add("aten::dist", x, x.flip(0))
            batch.add("aten::dist", x, x.flip(0), 1)

    each(FLOATS + COMPLEX, call)


def test_logsumexp() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 4, 5)
        for dims, keepdim in (([1], False), ([0], True), ([0, 1], False)):
            batch.add("aten::logsumexp", x, dims, keepdim)
        if dtype.is_floating_point:
            far = torch.tensor([[-INF, -INF], [INF, 1.0], [300.0, 300.0]]).to(dtype)
            batch.add("aten::logsumexp", far, [1])

    each(FLOATS + INTEGERS, call)


def test_softmax() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 3, 4) * 3
        masked = x.clone()
        masked[0], masked[1, :3] = -INF, -INF
        for dim in (0, -1):
            for op in ("_softmax", "_log_softmax"):
                # Along -1 the CPU's 16-bit results were measured 254 units of the last place off.
                batch.add(f"aten::{op}", x, dim, False, rounded_once=op == "_log_softmax")
                output = getattr(torch.ops.aten, op)(x, dim, False)
                batch.add(f"aten::{op}_backward_data", x.flip(0), output, dim, dtype)
        for t in (masked, x):
            batch.add("aten::_safe_softmax", t, -1)
        batch.add("aten::_softmax", masked, 1, False)
        batch.add("aten::_softmax", x[0, 0], 0, False)

    each(FLOATS, call)


def test_order_statistics() -> None:
    """Values that all differ, so that PyTorch leaves no choice of index."""

    def call(batch: Batch, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        x = torch.stack([torch.randperm(7, generator=generator) for _ in range(4)]).to(dtype)
        inputs = [x, x[:, :6]]
        if dtype.is_floating_point:
            holes = x.clone()
            holes[0, 3], holes[1, :2] = NAN, NAN
            holes[2] = NAN
            inputs.append(holes)
        for t in inputs:
            batch.add("aten::median", t)
            batch.add("aten::nanmedian", t)
            if t is not x and len(inputs) == 3 and t is inputs[2]:
                t = t[:1]  # one nan: the index of a nan among several is anyone's
            batch.add("aten::median.dim", t, 1)
            batch.add("aten::nanmedian.dim", t, -1, True)
        batch.add("aten::kthvalue", x, 3, 1)
        batch.add("aten::kthvalue", x, 7, -1, True)
        batch.add("aten::median", x[0, 0])
        batch.add("aten::median.dim", x[0, 0], 0)

    each(REAL, call)


def test_mode() -> None:
    batch = Batch()
    for dtype in (torch.int64, torch.float32):
        x = torch.tensor([[2, 1, 2, 1, 3], [4, 4, 0, 1, 2], [5, 4, 3, 2, 1]], dtype=dtype)
        batch.add("aten::mode", x, 1)
        batch.add("aten::mode", x, 0, True)
    batch.check()


@pytest.mark.parametrize("op", ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"])
def test_cumulative(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = values(dtype, 3, 6)
        for dim in (0, -1):
            batch.add(f"aten::{op}", x, dim)
        batch.add(f"aten::{op}", x[0, 0], 0)
        batch.add(f"aten::{op}", x[:0], 0)
        if dtype.is_floating_point and op in ("cummax", "cummin"):
            batch.add(f"aten::{op}", with_nan(dtype), 1)
        if op in ("cumsum", "cumprod"):
            batch.add(f"aten::{op}", x, 1, dtype=torch.float64)

    each(FLOATS if op == "logcumsumexp" else REAL + BOOL, call)


def test_sixteen_bit_sums_are_accumulated_in_float32() -> None:
    module = text("aten::sum", torch.ones(8, dtype=torch.bfloat16))
    assert "stablehlo.reduce" in module
    assert "tensor<8xf32>" in module


def test_a_mean_is_one_reduction() -> None:
    """One reduction and one division."""
    module = text("aten::mean.dim", torch.ones(8, 4), [1])
    assert module.count("stablehlo.reduce") == 1


@pytest.mark.parametrize("name", ["amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extrema_keep_nan(name, dtype):
    """Whose place among the elements does not matter."""
    for place in range(20):
        x = torch.arange(40.0).reshape(2, 20).to(dtype)
        x[0, place] = NAN
        check(f"aten::{name}", x, [1])
        check(f"aten::{name}", x, [0])
        check(f"aten::{name}", x, [0, 1], True)


def test_norms_and_extrema_of_everything_keep_nan():
    x = torch.tensor([1.0, NAN, 3.0, -1.0])
    check("aten::max", x)
    check("aten::min", x)
    check("aten::aminmax", x)
    check("aten::linalg_vector_norm", x, INF)
    check("aten::linalg_vector_norm", x, -INF)


@pytest.mark.parametrize(("platform", "barriers"), [("tpu", 1), ("cpu", 0), ("cuda", 0)])
def test_the_sums_of_a_softmax_gradient_are_made_once(platform, barriers):
    """XLA's TPU compiler would make them in everything that reads the gradient."""
    weights = torch.randn(2, 3, 5).softmax(-1)
    arguments = (torch.randn(2, 3, 5), weights, -1, torch.float32)
    recorded = record("aten::_softmax_backward_data", *arguments)
    assert lower_to_text(recorded.program, platform).count("optimization_barrier") == barriers
    got, _ = execute(recorded.program, recorded.inputs, platform)
    torch.testing.assert_close(got, recorded.expected)


SUMMED_AS_A_MATMUL = [
    ((3, 40, 50), torch.float32, [1, 2], False),  # few rows of few terms
    ((3, 400, 50), torch.float32, [1, 2], True),
    ((80, 50), torch.float32, [1], True),
    ((80, 5, 50), torch.float32, [-1, 1], True),
    ((2, 80, 5, 50), torch.float32, [0, 2, 3], True),
    ((2, 80, 50), torch.bfloat16, [2], True),
    ((80, 50), torch.float64, [1], False),
    ((80, 50), torch.float32, [0], False),
    ((80, 5, 50), torch.float32, [1], False),
    ((80, 8), torch.float32, [1], False),  # few terms
    ((80, 8192), torch.float32, [1], True),  # in two parts
    ((80, 9999), torch.float32, [1], True),  # in three
    ((80, 8209), torch.float32, [1], False),  # a prime number
    ((80, 4099), torch.float32, [1], True),
    ((80, 3, 5000), torch.float32, [1, 2], True),
    ((80, 3, 5003), torch.float32, [1, 2], True),
    ((80, 0), torch.float32, [1], False),
]


@pytest.mark.parametrize(("shape", "dtype", "dims", "is_one"), SUMMED_AS_A_MATMUL, ids=str)
def test_sums_of_rows_that_are_computed_are_matmuls(shape, dtype, dims, is_one):
    """Not those of what is in memory: nansum computes what it adds, sum does not."""
    x = values(dtype, *shape).round()  # the order of sums does not show
    recorded = record("aten::nansum", x, dims)
    for platform, expected in (("cpu", is_one), ("tpu", False)):
        assert ("dot_general" in lower_to_text(recorded.program, platform)) == expected
    check("aten::nansum", x, dims)
    if dtype != torch.bfloat16:  # which is converted first
        assert "dot_general" not in text("aten::sum.dim_IntList", x, dims)


def test_sums_as_matmuls_keep_what_is_no_number():
    x = torch.ones(80, 50, dtype=torch.bfloat16)
    x[0, 1], x[1, 2], x[2, 3], x[3, 4], x[3, 5] = NAN, INF, -INF, INF, -INF
    assert "dot_general" in text("aten::sum.dim_IntList", x, [1])
    check("aten::sum.dim_IntList", x, [1])


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [([0, 1], "6x20"), ([2, 3], "6x20"), ([1, 2], "2x12x5"), ([0, 3], "2x12x5"), ([1], "2x3x20")],
)
def test_adjacent_dimensions_are_reduced_as_one_on_the_cpu(dims, sizes):
    x = values(torch.float32, 2, 3, 4, 5)
    for name in ("aten::amax", "aten::all.dims", "aten::sum.dim_IntList"):
        check(name, x, dims)
    program = record("aten::amax", x, dims).program
    for platform, expected in (("cpu", True), ("tpu", False)):
        assert (f"tensor<{sizes}xf32>" in lower_to_text(program, platform)) == expected


def test_sums_keep_the_dimensions_that_are_reduced():
    """Each is summed before the next where they are long: errors do not grow with their product."""
    module = text("aten::sum.dim_IntList", values(torch.float32, 2, 3, 4, 5), [0, 1])
    assert "tensor<2x3x20xf32>" in module
