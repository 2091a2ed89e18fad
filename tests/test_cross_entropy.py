"""Cross-entropy of logits: one node forward, one backward, and PyTorch's operators for whoever
watches.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lazyxla
from lazyxla.dynamo import backend
from tests.support import DEVICE, Watch, assert_same, check, counted, error_of, on_device

CLASSES = 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25])
REDUCTIONS = ["none", "mean", "sum"]


def batch(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits (N, CLASSES, ...) and classes (N, ...) for a shape (N, ...)."""
    logits = torch.randn(shape[0], CLASSES, *shape[1:], dtype=dtype)
    return logits, torch.randint(0, CLASSES, shape)


def with_gradient(logits: Tensor, target: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss, and the logits' gradient for one of the loss that is not 1 everywhere."""
    leaf = logits.detach().requires_grad_()
    loss = functional.cross_entropy(leaf, target, **options)
    (gradient,) = torch.autograd.grad(loss.sin().sum(), leaf)
    return loss, gradient


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(5,), (3, 2), (2, 3, 2), (2, 1, 3, 2)], ids=str)
def test_as_on_the_cpu(shape, reduction):
    def run(logits, target, weight):
        weighted = with_gradient(logits, target, reduction=reduction, weight=weight)
        some = with_gradient(logits, target, reduction=reduction, ignore_index=1)
        return with_gradient(logits, target, reduction=reduction), weighted, some

    with counted() as n:
        check(run, *batch(*shape), WEIGHT)
    assert n.fallbacks == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    def run(logits, target, weight):
        return with_gradient(logits, target, weight=weight)

    check(run, *batch(5, dtype=dtype), WEIGHT.to(dtype))


def test_nodes():
    logits, target = on_device(batch(3, 2))
    leaf = logits.requires_grad_()
    with counted() as n:
        loss = functional.cross_entropy(leaf, target)
    assert n.nodes_recorded == 1
    above = on_device(torch.tensor(0.5))
    with counted() as n:
        loss.backward(above)
    assert n.nodes_recorded == 1


def test_eager_mode_runs_each_pass_at_once():
    """Also of logits in another shape than they were computed in."""
    logits, target = on_device((torch.randn(2, 3, CLASSES), torch.tensor([0, 1, 2, 3, 0, 1])))
    with lazyxla.eager_mode(True):
        leaf = logits.requires_grad_()
        with counted() as n:
            loss = functional.cross_entropy(leaf.flatten(0, 1), target)
            loss.backward(loss.detach())
    assert n.executions == 2


def test_impossible_classes():
    """A probability of 0 makes an infinite loss only where it is asked for."""
    logits = torch.tensor([[0.0, -math.inf, 1.0], [-math.inf, 0.0, -math.inf]])
    for classes in ([0, 1], [1, 1], [2, -100]):
        check(lambda x, t: with_gradient(x, t, reduction="none"), logits, torch.tensor(classes))


def test_where_all_is_ignored():
    logits, _ = batch(3)
    check(with_gradient, logits, torch.full((3,), -100))


def test_large_logits_lose_nothing():
    logits, target = batch(5)
    check(with_gradient, logits + 30000, target)


def test_logits_may_be_written_to_before_the_backward_pass():
    def run(logits, target):
        leaf = logits.requires_grad_()
        scores = leaf * 2
        loss = functional.cross_entropy(scores, target)
        scores.detach().zero_()  # counted as a write to scores
        loss.backward()
        return leaf.grad, scores

    check(run, *batch(5))


def test_the_target_may_not_be_written_to():
    def run(logits, target):
        loss = functional.cross_entropy(logits.requires_grad_(), target)
        target.zero_()
        loss.backward()

    kind, text = error_of(run, *on_device(batch(5)))
    assert kind is RuntimeError
    assert "has been modified by an inplace operation" in text


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives(reduction):
    def run(logits, target):
        leaf = logits.detach().requires_grad_()
        scores = leaf.sin() * 3
        loss = functional.cross_entropy(scores, target, weight=None, reduction=reduction)
        (first,) = torch.autograd.grad(loss.exp().sum(), leaf, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), leaf)

    check(run, *batch(5, dtype=torch.float64))


def test_forward_mode_derivatives():
    def run(logits, target):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(logits, logits.cos())
            result = forward_ad.unpack_dual(functional.cross_entropy(dual, target))
            return result.primal, result.tangent

    check(run, *batch(5))


def test_derivatives_of_functions():
    def run(logits, target):
        grad = torch.func.grad(functional.cross_entropy)
        return grad(logits, target), torch.func.vmap(grad)(logits, target)

    check(run, *batch(5))


def test_what_is_left_to_pytorch():
    def run(logits, target, probabilities):
        leaf = logits.detach().requires_grad_()
        smooth = functional.cross_entropy(leaf, target, label_smoothing=0.1)
        soft = functional.cross_entropy(leaf, probabilities)
        single = functional.cross_entropy(leaf[0], target[0])
        return *torch.autograd.grad(smooth + soft + single, leaf), smooth, soft, single

    logits, target = batch(5)
    check(run, logits, target, logits.softmax(1))


def test_of_nothing():
    def run(logits, target):
        return with_gradient(logits, target, reduction="none")

    check(run, *batch(0))


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.randn(3, 4), torch.zeros(2, dtype=torch.long)),
        (torch.randn(3, 4, 2), torch.zeros(3, dtype=torch.long)),
        (torch.randn(3, 4), torch.zeros(3, dtype=torch.long), torch.ones(3)),
        (torch.randn(3, 4), torch.zeros(3, dtype=torch.int32)),
        (torch.randn(3, 4).to(torch.float8_e5m2), torch.zeros(3, dtype=torch.long)),
    ],
    ids=["batch", "dimensions", "weight", "dtype", "float8"],
)
def test_errors(arguments):
    ours = error_of(functional.cross_entropy, *on_device(arguments))
    theirs = error_of(functional.cross_entropy, *arguments)
    assert theirs[0] is not type(None)
    assert ours == theirs


def test_autocast():
    logits, target = on_device(batch(5, dtype=torch.bfloat16))
    leaf = logits.requires_grad_()
    with torch.autocast(DEVICE), counted() as n:
        loss = functional.cross_entropy(leaf, target)
    assert n.nodes_recorded == 2  # a conversion
    assert loss.dtype == torch.float32
    loss.backward()
    assert leaf.grad.dtype == torch.bfloat16
    exact = logits.detach().cpu().float()
    torch.testing.assert_close(loss.cpu(), functional.cross_entropy(exact, target.cpu()))


def test_modes_see_the_operators_that_they_see_on_the_cpu():
    logits, target = batch(5)

    def seen(device):
        leaf, classes = logits.to(device).requires_grad_(), target.to(device)
        with Watch() as watch:
            functional.cross_entropy(leaf, classes).backward()
        return watch.seen

    found = seen(DEVICE)
    assert found == seen("cpu")
    assert "aten.nll_loss_forward.default" in found


def test_what_is_kept_for_the_gradient_may_be_kept_elsewhere():
    def run(logits, target):
        with save_on_cpu():
            loss, gradient = with_gradient(logits, target)
        again = checkpoint(with_gradient, logits, target, use_reentrant=False)
        return loss, gradient, again

    check(run, *batch(5))


@pytest.mark.parametrize("writes", [False, True])
def test_torch_compile(writes: bool, fresh_dynamo: None, traced_operators: list[str]) -> None:
    """One node each way, also for logits that are written to afterwards."""
    logits, target = on_device(batch(5))

    def run(x: Tensor) -> Tensor:
        doubled = x * 2
        loss = functional.cross_entropy(doubled, target)
        if writes:
            doubled.zero_()
        return loss

    expected = with_gradient(logits * 2, target)
    leaf = logits.clone().requires_grad_()
    with counted() as n:
        loss = torch.compile(run, backend=backend, fullgraph=True)(leaf)
        (gradient,) = torch.autograd.grad(loss.sin(), leaf)
    assert n.fallbacks == 0
    assert_same((loss, gradient / 2), [x.detach().cpu() for x in expected])
    ops = [name for name in traced_operators if "entropy" in name or "softmax" in name]
    assert ops == [f"lazyxla.cross_entropy{part}.default" for part in ("", "_backward")]


def test_other_tracers_see_pytorchs_operators() -> None:
    logits, target = on_device(batch(5))
    traced = make_fx(lambda x, y: functional.cross_entropy(x, y), tracing_mode="fake")
    graph = traced(logits, target).graph
    ops = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert {"aten._log_softmax.default", "aten.nll_loss_forward.default"} <= ops
