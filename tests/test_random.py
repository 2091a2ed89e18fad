"""Random numbers on the device: seeds, generators, streams and laws.

tests/lowering/test_random.py tests the rules one by one. Seeds are fixed, so that nothing here is
left to chance.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, counted, error_of

pytestmark = pytest.mark.cuda

COUNT = 20_000
Draw = Callable[..., torch.Tensor]


def _empty(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(COUNT, dtype=dtype, device=DEVICE)


def _full(value: float) -> torch.Tensor:
    return torch.full((COUNT,), float(value), device=DEVICE)


# What draws COUNT numbers, given keyword arguments for the generator, and their law.
DRAWS: dict[str, tuple[Draw, Any]] = {
    "rand": (lambda **g: torch.rand(COUNT, device=DEVICE, **g), stats.uniform()),
    "randn": (lambda **g: torch.randn(COUNT, device=DEVICE, **g), stats.norm()),
    "randint": (lambda **g: torch.randint(-3, 9, (COUNT,), device=DEVICE, **g), range(-3, 9)),
    "uniform_": (lambda **g: _empty().uniform_(-1, 3, **g), stats.uniform(-1, 4)),
    "normal_": (lambda **g: _empty().normal_(1, 2, **g), stats.norm(1, 2)),
    "normal": (lambda **g: torch.normal(_full(1), _full(2), **g), stats.norm(1, 2)),
    "exponential_": (lambda **g: _empty().exponential_(2, **g), stats.expon(scale=0.5)),
    "cauchy_": (lambda **g: _empty().cauchy_(1, 2, **g), stats.cauchy(1, 2)),
    "log_normal_": (
        lambda **g: _empty().log_normal_(0.5, 0.25, **g),
        stats.lognorm(0.25, scale=math.exp(0.5)),
    ),
    "geometric_": (lambda **g: _empty().geometric_(0.3, **g), stats.geom(0.3)),
    "random_": (lambda **g: _empty(torch.int64).random_(7, **g), range(7)),
    "bernoulli_": (lambda **g: _empty().bernoulli_(0.3, **g), stats.bernoulli(0.3)),
    "bernoulli": (lambda **g: torch.bernoulli(_full(0.3), **g), stats.bernoulli(0.3)),
    "poisson": (lambda **g: torch.poisson(_full(3.5), **g), stats.poisson(3.5)),
    "large poisson": (lambda **g: torch.poisson(_full(50), **g), stats.poisson(50)),
    "binomial": (
        lambda **g: torch.binomial(_full(9), _full(0.3), **g),
        stats.binom(9, 0.3),
    ),
    "large binomial": (
        lambda **g: torch.binomial(_full(200), _full(0.6), **g),
        stats.binom(200, 0.6),
    ),
    "gamma": (lambda **g: torch._standard_gamma(_full(3), **g), stats.gamma(3)),
    "small gamma": (lambda **g: torch._standard_gamma(_full(0.3), **g), stats.gamma(0.3)),
    "dirichlet": (
        lambda **g: torch._sample_dirichlet(
            torch.tensor([1.0, 2.0, 5.0], device=DEVICE).repeat(COUNT, 1), **g
        )[:, 0],
        stats.beta(1, 7),
    ),
    "multinomial": (
        lambda **g: torch.multinomial(torch.ones(6, device=DEVICE), COUNT, True, **g),
        range(6),
    ),
    "multinomial, one each": (
        lambda **g: torch.multinomial(torch.ones(COUNT // 5, 6, device=DEVICE), 5, **g).flatten(),
        range(6),
    ),
    "randperm": (lambda **g: torch.randperm(COUNT, device=DEVICE, **g), None),
}
CONTINUOUS = [
    n for n, (_, law) in DRAWS.items() if isinstance(getattr(law, "dist", 0), stats.rv_continuous)
]


def assert_law(x: torch.Tensor, law: Any) -> None:
    """Kolmogorov and Smirnov's test of continuous numbers, Pearson's of whole ones."""
    values = x.cpu().double().flatten().numpy()
    if isinstance(law, range):
        law = stats.randint(law.start, law.stop)
    if isinstance(law.dist, stats.rv_continuous):
        assert stats.kstest(values, law.cdf).pvalue > 1e-3
        return
    low, high = (int(law.ppf(q)) for q in (0.005, 0.995))
    edges = range(low, high + 1)
    observed = [(values <= low).sum(), *((values == e).sum() for e in edges[1:-1])]
    expected = [law.cdf(low), *(law.pmf(e) for e in edges[1:-1])]
    observed.append(len(values) - sum(observed))
    expected.append(1 - sum(expected))
    assert stats.chisquare(observed, [e * len(values) for e in expected]).pvalue > 1e-3
    assert (values == values.round()).all()


# --- Laws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in DRAWS if n != "randperm"])
def test_laws(name: str) -> None:
    draw, law = DRAWS[name]
    with counted() as n:
        x = draw()
        assert_law(x, law)
    assert (n.fallbacks, n.host_calls) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Moments, since rounded numbers follow no continuous law."""
    x = torch.randn(COUNT, dtype=dtype, device=DEVICE).double().cpu()
    assert abs(x.mean()) < 4 / math.sqrt(COUNT)
    assert abs(x.var() - 1) < 0.05
    x = torch.rand(COUNT, dtype=dtype, device=DEVICE).double().cpu()
    assert x.min() >= 0
    assert x.max() < 1
    assert abs(x.mean() - 0.5) < 4 * math.sqrt(1 / 12 / COUNT) + torch.finfo(dtype).eps
    x = torch.poisson(torch.full((COUNT,), 3.5, dtype=dtype, device=DEVICE))
    assert x.dtype == dtype
    assert_law(x, stats.poisson(3.5))
    x = torch._standard_gamma(torch.full((COUNT,), 2.0, dtype=dtype, device=DEVICE))
    assert x.dtype == dtype
    assert abs(x.double().cpu().mean() - 2) < 5 * math.sqrt(2 / COUNT) + 2 * torch.finfo(dtype).eps


def test_permutations() -> None:
    """Each is one, and all of a few elements come equally often."""
    x = torch.randperm(COUNT, device=DEVICE).cpu()
    assert torch.equal(x.sort()[0], torch.arange(COUNT))
    assert abs(stats.kendalltau(x.numpy(), range(COUNT)).statistic) < 0.02
    drawn = [torch.randperm(3, device=DEVICE).tolist() for _ in range(600)]
    counts = [drawn.count(list(p)) for p in itertools.permutations(range(3))]
    assert sum(counts) == 600
    assert stats.chisquare(counts).pvalue > 1e-3


def test_multinomial_without_replacement() -> None:
    """The first by weight, the second by weight among the others; none twice, none of weight 0."""
    weights = torch.tensor([0.0, 1.0, 4.0, 5.0])
    x = torch.multinomial(weights.repeat(COUNT, 1).to(DEVICE), 2).cpu()
    assert (x[:, 0] != x[:, 1]).all()
    assert (x > 0).all()
    p = weights / 10
    expected = {(i, j): p[i] * p[j] / (1 - p[i]) for i in (1, 2, 3) for j in (1, 2, 3) if i != j}
    observed = [(x == torch.tensor(pair)).all(1).sum().item() for pair in expected]
    wanted = [float(e) * COUNT for e in expected.values()]
    assert stats.chisquare(observed, wanted).pvalue > 1e-3


def test_extreme_parameters() -> None:
    def draw(function: Callable[..., torch.Tensor], *parameters: list[float]) -> list[float]:
        return function(*(torch.tensor(p, device=DEVICE) for p in parameters)).cpu().tolist()

    assert draw(torch.poisson, [0.0, 0.0]) == [0, 0]
    assert draw(torch.binomial, [0.0, 5.0, 5.0], [0.5, 0.0, 1.0]) == [0, 0, 5]
    assert draw(torch.bernoulli, [0.0, 1.0]) == [0, 1]
    assert all(math.isfinite(x) for x in draw(torch._standard_gamma, [1e-3] * 100 + [1e6]))
    assert draw(torch.normal, [1.0, math.inf], [0.0, 1.0]) == [1, math.inf]
    for shape in ((0,), (2, 0)):
        for function in (torch.poisson, torch.bernoulli, torch._standard_gamma):
            assert function(torch.ones(shape, device=DEVICE)).shape == shape


# --- Streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWS)
def test_seeds_and_generators(name: str) -> None:
    """The same seed gives the same numbers, wherever the graph is cut; each call others."""
    draw, _ = DRAWS[name]
    torch.manual_seed(4)
    first, second = draw(), draw()
    first, second = first.cpu(), second.cpu()
    torch.manual_seed(4)
    assert torch.equal(draw().cpu(), first)
    assert torch.equal(draw().cpu(), second)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert not torch.equal(draw().cpu(), first)
    # A generator of one's own is another stream, and leaves the default one alone.
    torch.manual_seed(4)
    generator = torch.Generator(DEVICE).manual_seed(4)
    assert torch.equal(draw(generator=generator).cpu(), first)
    assert torch.equal(draw(generator=generator).cpu(), second)
    assert torch.equal(draw().cpu(), first)


@pytest.mark.parametrize("name", DRAWS)
def test_a_new_seed_compiles_nothing(name: str) -> None:
    draw, _ = DRAWS[name]
    generator = torch.Generator(DEVICE)
    draw().cpu()
    draw(generator=generator).cpu()  # of some operators another overload
    with counted() as n:
        for seed in (1, 2**63, 2**64 - 1):
            torch.manual_seed(seed)
            draw().cpu()
            draw(generator=generator.manual_seed(seed)).cpu()
    assert n.compiles == 0
    assert n.lowerings == 0


def test_operators_and_calls_are_independent() -> None:
    """Ranks of what different operators, calls and seeds draw are uncorrelated."""
    columns = []
    for seed in (0, 1, 2**32, 2**32 + 1):
        torch.manual_seed(seed)
        columns += [DRAWS[name][0]().cpu() for name in CONTINUOUS]
        columns += [torch.randn(COUNT, device=DEVICE).cpu() for _ in range(2)]
    ranks = torch.stack(columns).argsort(1).argsort(1).double()
    correlations = torch.corrcoef(ranks).triu(1)
    # 1128 pairs: one in twenty thousand is as far off as 4 deviations.
    assert correlations.abs().max() < 4.5 / math.sqrt(COUNT)
    shifted = torch.corrcoef(torch.cat([ranks[:, 1:], ranks[:, :-1]])).triu(1)
    assert shifted.abs().max() < 5 / math.sqrt(COUNT)


def test_no_two_streams_share_numbers() -> None:
    torch.manual_seed(0)
    seen: set[float] = set()
    for seed in range(4):
        torch.manual_seed(seed)
        for _ in range(4):
            drawn = torch.rand(COUNT, dtype=torch.float64, device=DEVICE).tolist()
            assert not seen & set(drawn)
            seen.update(drawn)


# --- State ---------------------------------------------------------------------------------------


def rand() -> list[float]:
    return torch.rand(4, device=DEVICE).tolist()


def test_state(keep_random_state: None) -> None:
    torch.manual_seed(1)
    rand()
    state = lazyxla.get_rng_state()
    expected = rand(), rand()
    lazyxla.set_rng_state(state)
    assert (rand(), rand()) == expected
    generator = torch.Generator(DEVICE)
    generator.set_state(state)
    twin = generator.clone_state()
    drawn = torch.rand(4, device=DEVICE, generator=generator).tolist()
    assert drawn == expected[0]
    assert torch.rand(4, device=DEVICE, generator=twin).tolist() == expected[0]
    assert torch.equal(copy.deepcopy(state), state)


@pytest.mark.skipif("torch.lazyxla.device_count() != 2", reason="needs two devices")
def test_wrong_states_change_none(keep_random_state: None) -> None:
    torch.manual_seed(1)
    states = torch.lazyxla.get_rng_state_all()
    torch.manual_seed(2)
    for wrong in (torch.zeros(3, dtype=torch.uint8), None):
        with pytest.raises((ValueError, TypeError)):
            torch.lazyxla.set_rng_state_all([states[0], wrong])
    with pytest.raises(IndexError, match="index 2 is out of range"):
        torch.lazyxla.set_rng_state_all([*states, states[0]])
    assert torch.lazyxla.initial_seed() == 2
    torch.lazyxla.set_rng_state_all(states)
    assert torch.lazyxla.initial_seed() == 1


def test_fork_rng(keep_random_state: None) -> None:
    torch.manual_seed(1)
    expected = rand(), rand()
    torch.manual_seed(1)
    first = rand()
    with torch.random.fork_rng(devices=[0], device_type=DEVICE):
        torch.manual_seed(99)
        forked = rand()
    assert (first, rand()) == expected
    torch.manual_seed(99)
    assert rand() == forked


@pytest.mark.skipif("torch.lazyxla.device_count() < 2", reason="needs two devices")
def test_the_cpu_and_other_devices_have_their_own(keep_random_state: None) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    expected = rand()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    torch.rand(4)
    torch.rand(4, device="lazyxla:1")
    assert rand() == expected
    # Nor does asking the CPU's kernel for its opinion of the arguments.
    state = torch.get_rng_state()
    error_of(lambda: torch.empty(3, device=DEVICE).uniform_(2, 1))
    torch.empty(1, 7, 3, dtype=torch.float64, device=DEVICE).normal_()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", ["compile", "torch.compile", "eager", "fused"])
def test_modes_draw_new_numbers_each_time(mode: str, fresh_dynamo: None) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        noise = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        return x + torch.rand_like(x), x + torch.randn(64, device=x.device), noise

    if mode == "compile":
        run = lazyxla.compile(function)
    elif mode == "torch.compile":
        run = torch.compile(function, backend=backend)
    else:
        run = function
    eager = {"eager": True, "fused": "fused"}.get(mode, False)
    x = torch.zeros(64, device=DEVICE)
    with lazyxla.eager_mode(eager):  # type: ignore[arg-type]
        run(x)
        run(x)
        lazyxla.sync()
        drawn = []
        with counted() as n:
            for seed in (1, 2, 1):
                torch.manual_seed(seed)
                drawn.append([r.tolist() for r in (*run(x), *run(x))])
    assert n.compiles <= 1  # the two calls of a seed run as one program if nothing cuts between
    assert drawn[0] == drawn[2]
    assert len({str(r) for results in drawn[:2] for r in results}) == 12


FACTORIES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {
    "rand": (lambda x: torch.rand(COUNT, device=x.device), stats.uniform()),
    "rand_like": (torch.rand_like, stats.uniform()),
    "randn": (lambda x: torch.randn(COUNT, device=x.device), stats.norm()),
    "randn_like": (torch.randn_like, stats.norm()),
    "normal": (lambda x: torch.normal(1.0, 2.0, (COUNT,), device=x.device), stats.norm(1, 2)),
    "randint": (lambda x: torch.randint(9, (COUNT,), device=x.device), range(9)),
    "randint, low": (lambda x: torch.randint(-3, 9, (COUNT,), device=x.device), range(-3, 9)),
    "randint_like": (lambda x: torch.randint_like(x, 9), range(9)),
    "randint_like, low": (lambda x: torch.randint_like(x, -3, 9), range(-3, 9)),
    "bernoulli": (lambda x: torch.bernoulli(torch.full_like(x, 0.3)), stats.bernoulli(0.3)),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(), stats.expon()),
    "poisson": (lambda x: torch.poisson(x + 3.5), stats.poisson(3.5)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_in_traced_graphs(name: str, fresh_dynamo: None) -> None:
    """They are part of the graph's one node, and two of them in it differ."""
    draw, law = FACTORIES[name]
    compiled = torch.compile(lambda x: (draw(x), draw(x), x + 1), backend=backend)
    x = torch.zeros(COUNT, device=DEVICE)
    lazyxla.sync()
    kept = compiled(x)
    lazyxla.sync()
    del kept
    torch.manual_seed(3)
    with counted() as n:
        first, second, _ = compiled(x)
        lazyxla.sync()
    assert (n.nodes_recorded, n.executions, n.compiles) == (1, 1, 0)
    assert (first.dtype, first.shape) == (draw(torch.zeros(COUNT)).dtype, (COUNT,))
    assert_law(first, law)
    assert_law(second, law)
    assert not torch.equal(first.cpu(), second.cpu())
