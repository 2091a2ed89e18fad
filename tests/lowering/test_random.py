"""Random operators: distributions, streams, and what stays at run time."""

import math
from typing import Any

import pytest
import torch
from scipy import stats

from lazyxla.lowering import lower
from tests.lowering import harness
from tests.lowering.harness import check, record, run

COUNT = 20_000
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]

# Operator, its arguments after the tensor, and the distribution that they stand for.
CONTINUOUS = {
    "uniform": ("uniform", (), stats.uniform()),
    "uniform in an interval": ("uniform", (-2.0, 3.0), stats.uniform(-2, 5)),
    "normal": ("normal_functional", (), stats.norm()),
    "normal with parameters": ("normal_functional", (3.0, 0.5), stats.norm(3, 0.5)),
    "exponential": ("exponential", (), stats.expon()),
    "exponential with a rate": ("exponential", (4.0,), stats.expon(scale=0.25)),
    "cauchy": ("cauchy", (1.0, 2.0), stats.cauchy(1, 2)),
    "log-normal": ("log_normal", (0.5, 0.25), stats.lognorm(0.25, scale=math.exp(0.5))),
}
DISCRETE = {
    "geometric": ("geometric", (0.3,), stats.geom(0.3)),
    "random.to": ("random.to", (10,), stats.randint(0, 10)),
    "random.from": ("random.from", (-3, 4), stats.randint(-3, 4)),
    "bernoulli.p": ("bernoulli.p", (0.3,), stats.bernoulli(0.3)),
}


def sample(op: str, *arguments: Any, dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    (result,) = run(f"aten::{op}", torch.empty(COUNT, dtype=dtype), *arguments, seed=seed)
    assert result.dtype == dtype
    return result.double()


def assert_counts(x: torch.Tensor, law: Any) -> None:
    """A chi-squared test of integers, those that are too rare taken together."""
    values, counts = x.flatten().double().unique(return_counts=True)
    assert torch.equal(values, values.round())
    expected = torch.from_numpy(law.pmf(values.numpy())) * x.numel()
    assert (expected > 0).all()
    common = expected > 5
    observed = torch.cat([counts[common], x.numel() - counts[common].sum()[None]])
    wanted = torch.cat([expected[common], x.numel() - expected[common].sum()[None]]).clamp(min=1e-9)
    assert stats.chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1) > 1e-4


@pytest.mark.parametrize("name", CONTINUOUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_continuous(name: str, dtype: torch.dtype) -> None:
    op, arguments, law = CONTINUOUS[name]
    x = sample(op, *arguments, dtype=dtype)
    assert stats.kstest(x.numpy(), law.cdf).pvalue > 1e-3
    if "cauchy" not in name:
        error = law.std() / math.sqrt(COUNT)
        assert abs(x.mean() - law.mean()) < 4 * error
        assert abs(x.std() / law.std() - 1) < 0.1


@pytest.mark.parametrize("name", DISCRETE)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_discrete(name: str, dtype: torch.dtype) -> None:
    op, arguments, law = DISCRETE[name]
    assert_counts(sample(op, *arguments, dtype=dtype), law)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_floats(dtype: torch.dtype) -> None:
    """Bounds hold after rounding."""
    x = sample("uniform", dtype=dtype)
    assert x.min() >= 0
    assert x.max() < 1
    x = sample("uniform", 1.0, 1.25, dtype=dtype)
    assert x.min() >= 1
    assert x.max() < 1.25
    assert abs(sample("normal_functional", dtype=dtype).std() - 1) < 0.05
    x = sample("random.to", 4097, dtype=dtype)
    assert x.max() <= 4096
    assert sample("exponential", dtype=dtype).min() > 0


def test_complex_normal() -> None:
    (x,) = run("aten::normal_functional", torch.empty(COUNT, dtype=torch.complex64), 0.0, 2.0)
    for part in (x.real, x.imag):
        assert stats.kstest(part.numpy(), stats.norm(scale=math.sqrt(2)).cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.float32, torch.bfloat16]
)
def test_random_covers_the_dtype(dtype: torch.dtype) -> None:
    top = {torch.bool: 1, torch.float32: 1 << 24, torch.bfloat16: 1 << 8}.get(dtype)
    top = torch.iinfo(dtype).max if top is None else top
    x = sample("random", dtype=dtype)
    assert x.min() >= 0
    assert top * 0.98 <= x.max() <= top
    assert abs(x.mean() / (top / 2) - 1) < 0.05
    if not dtype.is_floating_point and dtype != torch.bool:
        low = torch.iinfo(dtype).min
        (x,) = run("aten::random.from", torch.empty(COUNT, dtype=dtype), low, None)
        assert x.min() <= low * 0.98
        assert x.max() >= torch.iinfo(dtype).max * 0.98


def test_random_without_an_upper_bound() -> None:
    """From `low` to what the dtype holds."""
    for dtype, top in ((torch.bool, 1), (torch.uint8, 255), (torch.float32, 1 << 24)):
        (x,) = run("aten::random.from", torch.empty(COUNT, dtype=dtype), 1, None)
        assert x.min() >= 1
        assert x.max() <= top
        assert abs(x.double().mean() / ((top + 1) / 2) - 1) < 0.05


def test_parameters_that_are_tensors() -> None:
    mean, std = torch.tensor([0.0, 100.0]).repeat(COUNT // 2), torch.full((COUNT,), 2.0)
    law = stats.norm(0, 2)
    for op, arguments in (
        ("Tensor_float", (mean, 2.0)),
        ("float_Tensor", (0.0, std)),
        ("Tensor_Tensor", (mean, std)),
    ):
        (x,) = run(f"aten::normal.{op}", *arguments)
        x = x - mean if op != "float_Tensor" else x
        assert stats.kstest(x.double().numpy(), law.cdf).pvalue > 1e-3
    p = torch.tensor([0.0, 0.25, 1.0]).repeat(COUNT // 4, 1)
    for dtype in (torch.float32, torch.float64):
        drawn = [run("aten::bernoulli", p.to(dtype))[0]]
        drawn += run("aten::bernoulli.Tensor", torch.empty(p.shape, dtype=torch.int32), p.to(dtype))
        for x in drawn:
            shares = x.double().mean(0)
            assert shares[0] == 0
            assert shares[2] == 1
            assert abs(shares[1] - 0.25) < 0.03


# ---- streams ----


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_streams(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream per seed and ordinal, the same at every run; both generators run on the CPU."""
    monkeypatch.setattr(harness, "lower", lambda p, _, **k: lower(p, platform, **k))

    def stream(seed: int, ordinal: int, count: int = COUNT) -> torch.Tensor:
        x = torch.empty(count, dtype=torch.float64)
        return run("aten::uniform", x, seed=seed, ordinal=ordinal)[0]

    first = stream(5, 7)
    assert torch.equal(first, stream(5, 7))
    assert stats.kstest(first.numpy(), stats.uniform().cdf).pvalue > 1e-3
    others = [stream(5, 8), stream(6, 7), stream(7, 5), stream(-5, 7), stream(5, 1 << 20)]
    for other in others:
        assert len(set(first.tolist()) & set(other.tolist())) == 0  # disjoint, not only shifted
        assert abs(torch.corrcoef(torch.stack([first, other]))[0, 1]) < 4 / math.sqrt(COUNT)
        shifted = torch.stack([first[1:], other[:-1]])
        assert abs(torch.corrcoef(shifted)[0, 1]) < 4 / math.sqrt(COUNT)
    # A longer draw starts like a shorter one, on odd sizes too; elements are uncorrelated.
    if platform == "cpu":
        assert torch.equal(stream(5, 7, 99), first[:99])
    assert abs(torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1]) < 4 / math.sqrt(COUNT)


def test_shapes() -> None:
    for shape in ((), (1,), (3, 5), (0,), (2, 0)):
        for dtype in DTYPES:
            (x,) = run("aten::uniform", torch.empty(shape, dtype=dtype))
            assert x.shape == shape


def test_nothing_is_compiled_in() -> None:
    """Seed, ordinal and parameters are inputs of the program."""
    x = torch.empty(10)
    for op, arguments in (
        ("uniform", (0.25, 0.5)),
        ("normal_functional", (0.25, 0.5)),
        ("exponential", (0.25,)),
        ("bernoulli.p", (0.25,)),
        ("native_dropout", (0.25, True)),
    ):
        program = record(f"aten::{op}", x, *arguments).program
        slots = [s._replace(variable=True) for s in program.slots]
        program = program._replace(slots=slots)
        assert lower(program, "cpu").static_slots == ()


# ---- permutations and categories ----


def test_randperm() -> None:
    for op, options in (("randperm", {}), ("randperm.generator", {"generator": None})):
        (x,) = run(f"aten::{op}", 1000, **options)
        assert x.sort()[0].tolist() == list(range(1000))
        assert abs(stats.kendalltau(x.numpy(), range(1000)).statistic) < 0.1
        (x,) = run(f"aten::{op}", 5, **options, dtype=torch.int32)
        assert x.sort()[0].tolist() == list(range(5))
        assert run(f"aten::{op}", 0, **options)[0].shape == (0,)


def test_multinomial_with_replacement() -> None:
    weights = torch.tensor([0.0, 1.0, 4.0, 0.0, 5.0, 0.0])
    law = stats.rv_discrete(values=(range(6), (weights / 10).numpy()))
    for given in (weights, weights.double(), weights.half()):
        (x,) = run("aten::multinomial", given, COUNT, True)
        assert_counts(x, law)
    (x,) = run("aten::multinomial", torch.stack([weights, weights.flip(0)]), COUNT, True)
    assert_counts(x[0], law)
    assert_counts(5 - x[1], law)


def test_multinomial_without_replacement() -> None:
    weights = torch.tensor([0.0, 1.0, 4.0, 5.0])
    rows = weights.repeat(COUNT, 1)
    (x,) = run("aten::multinomial", rows, 3)
    assert (x.sort(1)[0] == torch.tensor([1, 2, 3])).all()
    law = stats.rv_discrete(values=(range(4), (weights / 10).numpy()))
    assert_counts(x[:, 0], law)
    assert_counts(run("aten::multinomial", rows, 1)[0], law)


# ---- dropout ----


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(p: float, dtype: torch.dtype) -> None:
    x = torch.randn(COUNT).to(dtype)
    for variable in (False, True):
        recorded = record("aten::native_dropout", x, p, True)
        slots = [s._replace(variable=s.variable or variable) for s in recorded.program.slots]
        program = recorded.program._replace(slots=slots)
        (output, mask), _ = harness.execute(program, [x])
        assert abs(mask.double().mean() - (1 - p)) <= 4 * math.sqrt(p * (1 - p) / COUNT)
        scale = 0 if p == 1 else 1 / (1 - p)
        torch.testing.assert_close(output, (x.float() * mask * scale).to(dtype))
    check("aten::native_dropout_backward", x, mask, 2.0)


def test_dropout_outside_training() -> None:
    check("aten::native_dropout", torch.randn(5), 0.5, False)
    (output, mask) = run("aten::native_dropout", torch.ones(COUNT), 0.25, None)
    assert torch.equal(output > 0, mask)
    assert 0.7 < mask.double().mean() < 0.8


def test_rrelu() -> None:
    x, noise = torch.randn(COUNT), torch.zeros(COUNT)
    output, slope = run("aten::rrelu_with_noise_functional", x, noise, 0.25, 0.75, True)
    assert (slope[x > 0] == 1).all()
    negative = slope[x <= 0].double().numpy()
    assert stats.kstest(negative, stats.uniform(0.25, 0.5).cdf).pvalue > 1e-3
    torch.testing.assert_close(output, x * slope)
    check("aten::rrelu_with_noise_functional", x, noise, 0.25, 0.75, False)


# ---- by rejection ----


def test_gamma() -> None:
    for shape in (0.5, 3.0):
        (x,) = run("aten::_standard_gamma", torch.full((4000,), shape))
        assert stats.kstest(x.double().numpy(), stats.gamma(shape).cdf).pvalue > 1e-3
    (y,) = run("aten::_standard_gamma", torch.full((4000,), 3.0), ordinal=1)
    assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1]) < 0.07
    a, x = torch.tensor([0.5, 1.0, 5.0]), torch.tensor([0.3, 2.0, 4.0])
    (grad,) = run("aten::_standard_gamma_grad", a, x)
    # By numeric differentiation with 40 digits; PyTorch's kernel is up to 3e-5 off.
    torch.testing.assert_close(grad, torch.tensor([1.00980197, 1.63169146, 0.92272613]))


def test_counts() -> None:
    (x,) = run("aten::poisson", torch.full((COUNT,), 3.5))
    assert_counts(x, stats.poisson(3.5))
    (x,) = run("aten::binomial", torch.full((COUNT,), 9.0), torch.full((COUNT,), 0.3))
    assert_counts(x, stats.binom(9, 0.3))


def test_dirichlet() -> None:
    (x,) = run("aten::_sample_dirichlet", torch.tensor([1.0, 2.0, 5.0]).repeat(4000, 1))
    torch.testing.assert_close(x.sum(1), torch.ones(4000))
    assert stats.kstest(x[:, 0].double().numpy(), stats.beta(1, 7).cdf).pvalue > 1e-3
