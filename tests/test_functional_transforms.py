"""torch.func's transforms on the device: grad, vmap, jvp and their combinations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import lazyxla
from tests.support import DEVICE, check, fractions

pytestmark = pytest.mark.cuda


def loss(w, x):
    return ((x @ w).tanh() ** 2).sum() + (w**3).sum()


TRANSFORMS = {
    "grad": lambda w, x: grad(loss)(w, x),
    "grad_of_grad": lambda w, x: grad(lambda w: grad(loss)(w, x).square().sum())(w),
    "vjp": lambda w, x: vjp(loss, w, x)[1](torch.ones((), device=w.device)),
    "jvp": lambda w, x: jvp(loss, (w, x), (x.sum(0).expand(2, 3).t(), x * 2)),
    "vmap": lambda w, x: vmap(lambda row: (row @ w).sin())(x),
    "vmap_dims": lambda w, x: vmap(torch.dot, in_dims=(1, 0))(w, w.t()),
    "vmap_of_grad": lambda w, x: vmap(grad(loss), in_dims=(None, 0))(w, x),
    "vmap_in_place": lambda w, x: vmap(lambda row: row.clone().mul_(2).add_(row))(x),
    "jacrev": lambda w, x: jacrev(lambda w: (x @ w).tanh())(w),
    "jacfwd": lambda w, x: jacfwd(lambda w: (x @ w).tanh())(w),
    "hessian": lambda w, x: hessian(lambda v: (v**3).sum() * v[0])(w[:, 0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_functional_transforms(name):
    check(TRANSFORMS[name], fractions(3, 2), fractions(4, 3))


def test_per_sample_gradients_of_a_module():
    def use(x):
        module = nn.Linear(6, 2)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(fractions(*parameter.shape))
        module.to(x.device)
        parameters = {name: p.detach() for name, p in module.named_parameters()}

        def sample_loss(parameters, row):
            return functional_call(module, parameters, (row[None],)).square().sum()

        return vmap(grad(sample_loss), in_dims=(None, 0))(parameters, x)

    check(use, fractions(4, 6))


def test_random_numbers_under_vmap():
    x = torch.zeros(4, 3, device=DEVICE)
    different = vmap(lambda row: row + torch.rand_like(row), randomness="different")(x)
    assert len({tuple(row) for row in different.tolist()}) == 4
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda row: row + torch.rand_like(row))(x)


def test_forward_mode():
    def use(x, tangent):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            y = (dual * dual).sin()[:, ::2].clone()
            y.mul_(2)
            return tuple(forward_ad.unpack_dual(y))

    check(use, fractions(3, 4), fractions(3, 4).flip(0))


INFINITE = {
    "entropy": lambda x: vjp(torch.special.entr, x)[1](torch.ones_like(x))[0],
    "product": lambda x: torch.ones_like(x) * x.log(),
    "quotient": lambda x: x / torch.zeros_like(x),
    "sum": lambda x: (torch.ones_like(x) * x.log() + torch.ones_like(x)).sum(),
    "matmul": lambda x: torch.ones(2, 3, device=x.device) @ x.log().diag(),
}


@pytest.mark.parametrize("name", INFINITE)
def test_no_tangent_meets_no_infinity(name):
    """A factor that does not depend on the input has no tangent, which times nan is zero."""
    x, tangent = torch.tensor([-0.5, 0.0, 2.0]), torch.tensor([0.3, 1.0, -2.0])
    check(lambda x, tangent: jvp(INFINITE[name], (x,), (tangent,)), x, tangent)


def test_zeros_of_forward_mode():
    zeros = torch._efficientzerotensor((2, 3), device=DEVICE)
    x = torch.full((2, 3), torch.inf, device=DEVICE)
    assert zeros._is_zerotensor()
    before = lazyxla.counters()
    assert (x * zeros)._is_zerotensor()
    assert (x + zeros).shape == x.shape
    assert lazyxla.counters()["flushes"] == before["flushes"]
    assert lazyxla.counters()["fallbacks"] == before["fallbacks"]
    assert (x * zeros.t().clone().t()).isnan().all()
    for written in (zeros.clone(), torch.empty_like(zeros).copy_(zeros)):
        torch.testing.assert_close(written.add_(1).cpu(), torch.ones(2, 3))
    torch.testing.assert_close((zeros @ torch.ones(3, 2, device=DEVICE)).cpu(), torch.zeros(2, 2))
    torch.testing.assert_close((x + zeros).cpu(), x.cpu())
    assert zeros.tolist() == [[0.0] * 3] * 2
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zeros.add_(1)
