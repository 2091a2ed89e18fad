"""All of torch.distributions on the device, against the CPU: samples, gradients, densities.

Samples follow the CPU's law by Kolmogorov and Smirnov's test of two samples. So do the gradients of
`rsample`, one for each sample. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributions as D
from scipy import stats

import lazyxla
from tests.support import DEVICE, assert_same, counted

COUNT = 2000

COVARIANCE = [[2.0, 0.5], [0.5, 1.0]]
# Per distribution: how it is made of its parameters, and these.
CASES: dict[str, tuple[Callable[..., D.Distribution], tuple[Any, ...]]] = {
    "Bernoulli": (D.Bernoulli, (0.3,)),
    "Beta": (D.Beta, (0.5, 1.5)),
    "Binomial": (lambda p: D.Binomial(10, p), (0.3,)),
    "Categorical": (D.Categorical, ([0.1, 0.2, 0.7],)),
    "Cauchy": (D.Cauchy, (1.0, 2.0)),
    "Chi2": (D.Chi2, (3.0,)),
    "ContinuousBernoulli": (D.ContinuousBernoulli, (0.3,)),
    "Dirichlet": (D.Dirichlet, ([1.0, 2.0, 5.0],)),
    "Exponential": (D.Exponential, (2.0,)),
    "FisherSnedecor": (D.FisherSnedecor, (5.0, 7.0)),
    "Gamma": (D.Gamma, (0.5, 2.0)),
    "GeneralizedPareto": (D.GeneralizedPareto, (0.0, 1.0, 0.2)),
    "Geometric": (D.Geometric, (0.3,)),
    "Gumbel": (D.Gumbel, (1.0, 2.0)),
    "HalfCauchy": (D.HalfCauchy, (1.0,)),
    "HalfNormal": (D.HalfNormal, (2.0,)),
    "Independent": (
        lambda mean, std: D.Independent(D.Normal(mean, std), 1),
        ([0.0, 1.0], [1.0, 2.0]),
    ),
    "InverseGamma": (D.InverseGamma, (3.0, 2.0)),
    "Kumaraswamy": (D.Kumaraswamy, (2.0, 3.0)),
    "LKJCholesky": (lambda c: D.LKJCholesky(3, c), (1.5,)),
    "Laplace": (D.Laplace, (1.0, 2.0)),
    "LogNormal": (D.LogNormal, (0.5, 0.25)),
    "LogisticNormal": (D.LogisticNormal, ([0.0, 0.5], [1.0, 0.5])),
    "LowRankMultivariateNormal": (
        D.LowRankMultivariateNormal,
        ([0.0, 1.0], [[1.0], [0.5]], [1.0, 2.0]),
    ),
    "MixtureSameFamily": (
        lambda w, mean, std: D.MixtureSameFamily(D.Categorical(w), D.Normal(mean, std)),
        ([0.3, 0.7], [-1.0, 2.0], [1.0, 0.5]),
    ),
    "Multinomial": (lambda p: D.Multinomial(10, p), ([0.2, 0.3, 0.5],)),
    "MultivariateNormal": (D.MultivariateNormal, ([0.0, 1.0], COVARIANCE)),
    "NegativeBinomial": (D.NegativeBinomial, (5.0, 0.3)),
    "Normal": (D.Normal, (1.0, 2.0)),
    "OneHotCategorical": (D.OneHotCategorical, ([0.2, 0.3, 0.5],)),
    "OneHotCategoricalStraightThrough": (D.OneHotCategoricalStraightThrough, ([0.2, 0.3, 0.5],)),
    "Pareto": (D.Pareto, (1.0, 3.0)),
    "Poisson": (D.Poisson, (3.5,)),
    "RelaxedBernoulli": (D.RelaxedBernoulli, (0.7, 0.3)),
    "RelaxedOneHotCategorical": (
        lambda p: D.RelaxedOneHotCategorical(torch.tensor(0.7, device=p.device), p),
        ([0.2, 0.3, 0.5],),
    ),
    "StudentT": (D.StudentT, (4.0, 1.0, 2.0)),
    "TransformedDistribution": (
        lambda m, s: D.TransformedDistribution(D.Normal(m, s), [D.SigmoidTransform()]),
        (0.0, 1.0),
    ),
    "Uniform": (D.Uniform, (1.0, 3.0)),
    "VonMises": (D.VonMises, (0.5, 2.0)),
    "Weibull": (D.Weibull, (2.0, 1.5)),
    "Wishart": (D.Wishart, (4.0, COVARIANCE)),
}


def made(name: str, device: str, count: int = 1) -> tuple[D.Distribution, list[torch.Tensor]]:
    """A batch of `count` equal distributions and its parameters, which want gradients."""
    make, parameters = CASES[name]
    tensors = [torch.tensor(p) for p in parameters]
    leaves = [t.expand(count, *t.shape).clone().to(device).requires_grad_() for t in tensors]
    return make(*leaves), leaves


def assert_same_law(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    for a, b in zip(ours.cpu().reshape(COUNT, -1).T, theirs.reshape(COUNT, -1).T, strict=True):
        # What both compute to the same constant differs by rounding.
        if (a.max() - a.min()).abs() < 1e-5:
            torch.testing.assert_close(a.mean(), b.mean())
        else:
            assert stats.ks_2samp(a.numpy(), b.numpy()).pvalue > 1e-3


def test_all_are_here() -> None:
    every = {n for n in D.__all__ if isinstance(getattr(D, n), type)}
    every = {n for n in every if issubclass(getattr(D, n), D.Distribution)}
    assert every - {"Distribution", "ExponentialFamily"} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_samples(name: str) -> None:
    with counted() as n:
        ours = made(name, DEVICE)[0].sample((COUNT,))
        assert ours.device.type == DEVICE
        assert not ours.requires_grad
        assert_same_law(ours, made(name, "cpu")[0].sample((COUNT,)))
    assert n.fallbacks == 0


@pytest.mark.parametrize("name", [n for n in CASES if made(n, "cpu")[0].has_rsample])
def test_gradients_of_samples(name: str) -> None:
    """Per sample: that of the sum of its squares by each parameter."""

    def gradients(device: str) -> list[torch.Tensor]:
        distribution, leaves = made(name, device, COUNT)
        sample = distribution.rsample()
        assert sample.requires_grad
        grads = torch.autograd.grad(sample.square().sum(), leaves, allow_unused=True)
        return [g for g in grads if g is not None]

    with counted() as n:
        ours = gradients(DEVICE)
        for a, b in zip(ours, gradients("cpu"), strict=True):
            assert_same_law(a, b)
    assert ours
    assert n.fallbacks == 0


METHODS = ("entropy", "mean", "mode", "variance", "stddev", "log_prob", "cdf")


@pytest.mark.parametrize("name", CASES)
def test_densities_and_moments(name: str) -> None:
    """All that the CPU computes, at samples of the CPU's, with gradients of the density."""
    ours, our_leaves = made(name, DEVICE, 7)
    theirs, leaves = made(name, "cpu", 7)
    samples = theirs.sample()

    def value(distribution: D.Distribution, method: str, x: torch.Tensor) -> Any:
        found = getattr(distribution, method)
        if method in ("log_prob", "cdf"):
            return found(x)
        return found() if callable(found) else found

    compared = 0
    for method in METHODS:
        try:
            expected = value(theirs, method, samples)
        except NotImplementedError:
            with pytest.raises(NotImplementedError):
                value(ours, method, samples.to(DEVICE))
            continue
        assert_same(value(ours, method, samples.to(DEVICE)), expected, strides=False)
        compared += 1
    assert compared >= 1

    def gradients(distribution: D.Distribution, x: torch.Tensor, of: list[torch.Tensor]) -> Any:
        grads = torch.autograd.grad(distribution.log_prob(x).sum(), of, allow_unused=True)
        return [g for g in grads if g is not None]

    expected = gradients(theirs, samples, leaves)
    assert_same(gradients(ours, samples.to(DEVICE), our_leaves), expected, strides=False)


@pytest.mark.parametrize("name", ["Gamma", "Dirichlet", "Normal", "Poisson", "Categorical"])
def test_seeds(name: str) -> None:
    """They reproduce the samples, and cost no compilation."""
    distribution, _ = made(name, DEVICE)

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return distribution.sample((5,)).cpu()

    first = draw(1)
    draw(2)
    with counted() as n:
        assert torch.equal(draw(1), first)
        draw(3)
    assert n.compiles == 0


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ("Normal", "Normal"),
        ("Gamma", "Gamma"),
        ("Beta", "Beta"),
        ("Dirichlet", "Dirichlet"),
        ("Categorical", "Categorical"),
        ("Bernoulli", "Poisson"),
        ("MultivariateNormal", "LowRankMultivariateNormal"),
        ("Uniform", "Normal"),
    ],
)
def test_divergences(p: str, q: str) -> None:
    expected = D.kl_divergence(made(p, "cpu", 3)[0], made(q, "cpu", 3)[0])
    ours = D.kl_divergence(made(p, DEVICE, 3)[0], made(q, DEVICE, 3)[0])
    assert_same(ours, expected, strides=False)


def test_a_sampler_in_a_training_step() -> None:
    """Reparametrized samples within one program; the gradient reaches what it should."""
    mean = torch.zeros(64, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.SGD([mean], lr=0.1)
    lazyxla.sync()
    with counted() as n:
        for _ in range(60):
            optimizer.zero_grad()
            # Checking the arguments would read them.
            (D.Normal(mean, 0.1, validate_args=False).rsample() - 3).square().sum().backward()
            optimizer.step()
            lazyxla.sync()
    assert n.compiles <= 2
    assert n.executions == 60
    assert (mean.detach().cpu() - 3).abs().max() < 0.3
