"""Autograd and checkpointing on the device, against the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyxla
from tests.support import DEVICE, assert_same, check, counted, error_of, fractions, on_device

pytestmark = pytest.mark.cuda


def leaf(*shape: int) -> torch.Tensor:
    return fractions(*shape).clone().requires_grad_()


# --- Backward ------------------------------------------------------------------------------------

FUNCTIONS = {
    "arithmetic": lambda x, w: ((x * 2 + w[0]) / (w.square().sum(0) + 1) - x).tanh(),
    "matmul": lambda x, w: (x @ w.t()).relu(),
    "broadcasting": lambda x, w: x[:, None] * w[None, :, :] + x.sum(0, keepdim=True),
    "views": lambda x, w: x.view(2, 2, 6).transpose(0, 1)[1:, :, ::2].flatten() * w[0, 0],
    "in_place": lambda x, w: (x * 1).mul_(w).add_(x).clamp_(-0.5, 0.5),
    "write_into_view": lambda x, w: x.clone().t()[1:3].mul_(w.t()[1:3]).sum() + x,
    "assignment": lambda x, w: (
        torch.zeros_like(x).index_fill(0, torch.tensor([], dtype=torch.int64, device=x.device), 0)
        + x * w
    ),
    "softmax": lambda x, w: torch.log_softmax(x @ w.t(), -1),
    "layer_norm": lambda x, w: nn.functional.layer_norm(x, (6,), w[0], w[1]),
    "gelu": lambda x, w: nn.functional.gelu(x * w, approximate="tanh"),
    "reductions": lambda x, w: x.mean(0) * w.var(0) + x.logsumexp(0) + w.prod(0) + x.amax(0),
    "where": lambda x, w: torch.where(x > w, x * w, x.exp()),
    "cat": lambda x, w: torch.cat([x, w, x[:1]]).cumsum(0),
    "indexing": lambda x, w: x[torch.tensor([0, 2, 2], device=x.device)] * w[1:],
    "gather": lambda x, w: x.gather(1, torch.zeros(4, 2, dtype=torch.int64, device=x.device)),
    "norm": lambda x, w: (x + 3).norm(dim=1) + torch.linalg.vector_norm(w, 1),
    "complex": lambda x, w: torch.view_as_real(torch.complex(x, w) * (1 - 2j)).square(),
    "cast": lambda x, w: (x.double() * w).to(torch.float32) + x.to(torch.float64),
    "channels_last": lambda x, w: nn.functional.conv2d(
        x.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last), w.reshape(3, 2, 2, 2)
    ),
    "cross_entropy": lambda x, w: nn.functional.cross_entropy(
        x * w, torch.tensor([1, 0, 5, 2], device=x.device), label_smoothing=0.1
    ),
    "attention": lambda x, w: nn.functional.scaled_dot_product_attention(
        x[None, None], w[None, None], (x * w)[None, None], is_causal=True
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    def use(x, w):
        y = FUNCTIONS[name](x, w)
        weights = torch.arange(y.numel(), device=y.device).reshape(y.shape) % 3
        (y * weights).sum().backward()
        return y.detach(), x.grad, w.grad if w.grad is not None else 0

    check(use, leaf(4, 6), (fractions(4, 6).flip(1) + 0.1).requires_grad_())


def test_a_training_step_is_one_program():
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, target = on_device(fractions(4, 6)), torch.tensor([0, 1, 2, 1], device=DEVICE)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        lazyxla.sync()

    for _ in range(3):
        step()
    with counted() as n:
        for _ in range(5):
            step()
    assert (n.executions, n.flushes, n.cache_hits) == (5, 5, 5)
    assert n.compiles == n.fallbacks == n.downloads == n.uploads == 0


def test_gradients_accumulate():
    def use(x):
        for factor in (1, 2):
            (x * x * factor).sum().backward()
        first = x.grad.clone()
        y = (x.exp() * x).sum()
        y.backward(retain_graph=True)
        y.backward()
        return first, x.grad

    check(use, leaf(4, 6))


def test_backward_twice_is_refused():
    def use(x):
        y = (x.exp() * x).sum()
        y.backward()
        y.backward()

    kind, text = error_of(use, leaf(3))
    assert "backward through the graph a second time" in text
    assert error_of(use, on_device(leaf(3))) == (kind, text)


def test_hooks():
    seen = []

    def use(x):
        y = x * 2
        y.retain_grad()
        y.register_hook(lambda g: g * 3)
        handle = x.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
        module = nn.Identity()
        module.register_forward_hook(lambda m, args, out: out + 1)
        module.register_full_backward_hook(lambda m, g_in, g_out: (g_in[0] * 5,))
        module(y).sum().backward()
        handle.remove()
        return x.grad, y.grad

    check(use, leaf(2, 3))
    assert seen == ["cpu", DEVICE]


def test_double_backward():
    def use(x):
        y = (x**3).tanh().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return first.detach(), second

    check(use, leaf(4, 3))


def test_gradcheck():
    x = on_device(fractions(2, 3).double()).requires_grad_()
    w = on_device(fractions(3, 2).double()).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: (x @ w).sigmoid() * x.sum(), (x, w))
    assert torch.autograd.gradgradcheck(lambda x: (x * x).tanh(), (x,))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


def test_own_functions():
    def use(x):
        Cube.apply(x).sum().backward()
        return x.grad

    check(use, leaf(5))


def test_saved_tensor_hooks():
    def use(x):
        with torch.autograd.graph.save_on_cpu():
            y = (x.exp() * x).sum()
        y.backward()
        return x.grad

    check(use, leaf(5))


# --- Writes under autograd -----------------------------------------------------------------------

WRONG = {
    "leaf": lambda x: x.add_(1),
    "view_of_leaf": lambda x: x[0].zero_(),
    "saved": lambda x: (lambda y: (y.exp_(), y.add_(1))[0].sum().backward())(x * 1),
    "saved_through_a_view": lambda x: (
        lambda y: (lambda z: (y[0].mul_(2), z.sum().backward()))(y * y)
    )(x * 1),
    "unbind": lambda x: (x * 1).unbind(0)[0].add_(1),
    "no_grad_view": lambda x: _view_in_no_grad(x).add_(1),
    "inference": lambda x: _inference(x).add_(x).sum().backward(),
    "out": lambda x: torch.add(x, x, out=torch.empty_like(x)),
    "not_scalar": lambda x: (x * 2).backward(),
    "no_grad": lambda x: x.detach().sum().backward(),
    "grad_shape": lambda x: (x * 2).backward(x[0].detach()),
    "integer": lambda x: x.detach().long().requires_grad_(),
    "numpy": lambda x: x.tolist() and x.item(),
    "deepcopy": lambda x: __import__("copy").deepcopy(x * 2),
}


def _view_in_no_grad(x):
    y = x * 1
    with torch.no_grad():
        return y[0]


def _inference(x):
    with torch.inference_mode():
        return x * 1


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_pytorchs(name):
    kind, text = error_of(WRONG[name], leaf(3, 4))
    assert kind is not type(None)
    ours = error_of(WRONG[name], on_device(leaf(3, 4)))
    assert (ours[0], ours[1].replace("lazyxlaFloatType", "torch.FloatTensor")) == (kind, text)


def test_foreach_writes_count_for_autograd():
    y = on_device(leaf(3)) * 1
    z = y.square().sum()
    torch._foreach_add_([y.detach()], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


# --- Checkpointing -------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    def use(x, w):
        y = x
        for _ in range(3):
            y = checkpoint(lambda y: (y @ w).tanh() + y, y, use_reentrant=reentrant)
        y.sum().backward()
        return x.grad, w.grad

    check(use, leaf(4, 3), leaf(3, 3))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.usefixtures("keep_random_state")
def test_checkpointing_repeats_random_numbers(reentrant):
    """The recomputed dropout is the forward one: where y is 0 the gradient is."""
    x = on_device(torch.ones(64)).requires_grad_()
    torch.manual_seed(3)
    y = checkpoint(lambda x: nn.functional.dropout(x * 2, 0.5), x, use_reentrant=reentrant)
    torch.rand(3, device=DEVICE)
    y.sum().backward()
    assert 0 < (y == 0).sum().item() < 64
    assert torch.equal((y == 0).cpu(), (x.grad == 0).cpu())


# --- Threads -------------------------------------------------------------------------------------


def test_backward_in_threads():
    w = on_device(leaf(3, 3))
    errors = []

    def body(factor):
        try:
            for _ in range(5):
                (w * factor).tanh().sum().backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(factor,)) for factor in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    expected = leaf(3, 3)
    for factor in (1, 2, 3):
        (5 * (expected * factor).tanh().sum()).backward()
    assert_same(w.grad, expected.grad)


def test_a_program_may_end_with_backward(run_python):
    """Autograd's thread still holds Python objects then; it needs the GIL to let go of them."""
    for _ in range(3):
        run_python(
            """
import sys, torch, lazyxla
x = torch.ones(4, device="lazyxla", requires_grad=True)
y = x
for _ in range(300):
    y = y * 2
y = y.sum()
sys.setswitchinterval(5)  # seconds: no thread takes the GIL that is not given it
y.backward()
"""
        )


@pytest.mark.skipif("torch.lazyxla.device_count() < 2", reason="needs two devices")
def test_backward_on_two_devices():
    x = on_device(leaf(4))
    y = (x * 2).to("lazyxla:1")
    ((y * y).to("lazyxla:0") + x).sum().backward()
    assert x.grad.device.index == 0
    assert_same(x.grad, 8 * fractions(4) + 1)
