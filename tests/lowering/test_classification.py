"""Losses over classes, against PyTorch's CPU kernels."""

import math
from itertools import product

import pytest
import torch

from lazyxla.lowering import lower, lower_to_text
from tests.lowering import harness
from tests.lowering.batch import Batch
from tests.lowering.harness import check, run

NONE, MEAN, SUM = range(3)
REDUCTIONS = [NONE, MEAN, SUM]
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nll_loss(reduction: int, dtype: torch.dtype) -> None:
    batch = Batch()
    for weighted, spatial in product([False, True], [(), (2, 3)]):
        op = "aten::nll_loss2d" if spatial else "aten::nll_loss"
        x = torch.randn(5, 4, *spatial).log_softmax(1).to(dtype)
        target = torch.randint(0, 4, (5, *spatial))
        target[1] = -100
        rest = (WEIGHT.to(dtype) if weighted else None, reduction, -100)
        batch.add(f"{op}_forward", x, target, *rest)
        output, total = getattr(torch.ops.aten, f"{op[6:]}_forward")(x, target, *rest)
        batch.add(f"{op}_backward", torch.randn_like(output), x, target, *rest, total)
        batch.add(f"{op}_forward", x, target.clamp(min=0), rest[0], reduction, 2)
    batch.check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss_of_one_sample(reduction: int) -> None:
    batch = Batch()
    x = torch.randn(4)
    for target in (torch.tensor(2), torch.tensor(-100)):
        rest = (WEIGHT, reduction, -100)
        batch.add("aten::nll_loss_forward", x, target, *rest)
        output, total = torch.ops.aten.nll_loss_forward(x, target, *rest)
        batch.add("aten::nll_loss_backward", torch.ones_like(output), x, target, *rest, total)
    batch.check()


def test_nll_loss_where_all_is_ignored() -> None:
    batch = Batch()
    x, target = torch.randn(3, 4), torch.full((3,), -100)
    batch.add("aten::nll_loss_forward", x, target, None, MEAN, -100)
    total = torch.tensor(0.0)
    batch.add("aten::nll_loss_backward", torch.tensor(1.0), x, target, None, MEAN, -100, total)
    batch.check()


def test_nll_loss_of_impossible_classes() -> None:
    """A class of probability 0 that nobody asks for leaves no nan behind."""
    batch = Batch()
    x = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    batch.add("aten::nll_loss_forward", x, torch.tensor([0, 1]), None, MEAN, -100)
    batch.add("aten::nll_loss_forward", x, torch.tensor([0, -100]), None, SUM, -100)
    batch.check()


def test_nll_loss_of_a_class_without_weight() -> None:
    """Its nan and infinities are seen, as those of other classes are."""
    batch = Batch()
    x = torch.tensor([[math.nan, 1.0], [-math.inf, 2.0], [1.0, 2.0]])
    weight = torch.tensor([0.0, 1.0])
    for reduction in REDUCTIONS:
        rest = (torch.tensor([0, 0, 1]), weight, reduction, -100)
        batch.add("aten::nll_loss_forward", x, *rest)
        batch.add("aten::nll_loss_forward", x[2:], torch.tensor([0]), *rest[1:])
        output, total = torch.ops.aten.nll_loss_forward(x, *rest)
        batch.add("aten::nll_loss_backward", torch.ones_like(output), x, *rest, total)
    batch.check()


def test_nll_loss_for_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a gather; the program runs on the CPU as well."""
    x, target = torch.randn(5, 4).log_softmax(1), torch.tensor([0, 3, -100, 1, 2])
    arguments = (x, target, None, MEAN, -100)
    program = harness.record("aten::nll_loss_forward", *arguments).program
    assert "stablehlo.gather" in lower_to_text(program, "cpu")
    assert "stablehlo.gather" not in lower_to_text(program, "tpu")
    monkeypatch.setattr(harness, "lower", lambda p, _, **k: lower(p, "tpu", **k))
    check("aten::nll_loss_forward", *arguments)


def test_classes_are_told_apart_in_32_bits() -> None:
    """In 64 it is two comparisons on a TPU. A number that is no class does not become one."""
    x, target = torch.randn(3, 4).log_softmax(1), torch.tensor([1, 0, 3])
    arguments = (torch.tensor(1.0), x, target, None, SUM, -100, torch.tensor(3.0))
    recorded = harness.record("aten::nll_loss_backward", *arguments)
    for platform in ("cpu", "tpu"):
        program = lower_to_text(recorded.program, platform)
        assert "tensor<3x4xi32>" in program
        assert "tensor<3x4xi64>" not in program
    got, _ = harness.execute(recorded.program, recorded.inputs, "tpu")
    torch.testing.assert_close(got, recorded.expected)
    odd = torch.tensor([2**32 + 1, -(2**32), 3])
    inputs = [odd if value is target else value for value in recorded.inputs]
    (got,), _ = harness.execute(recorded.program, inputs)
    assert torch.equal(got, torch.tensor([[0.0] * 4, [0.0] * 4, [0, 0, 0, -1]]))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multi_margin_loss(reduction: int) -> None:
    batch = Batch()
    for p, weighted in product([1, 2], [False, True]):
        weight = WEIGHT if weighted else None
        for x, target in (
            (torch.randn(5, 4), torch.randint(0, 4, (5,))),
            (torch.randn(4), torch.tensor(1)),
            (torch.tensor([0.5, float("nan"), -1.0, 2.0]), torch.tensor(0)),
        ):
            batch.add("aten::multi_margin_loss", x, target, p, 0.7, weight, reduction)
            grad = torch.randn(5 if reduction == NONE and x.ndim == 2 else ())
            arguments = (grad, x, target, p, 0.7, weight, reduction)
            batch.add("aten::multi_margin_loss_backward", *arguments)
    batch.check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_multilabel_margin_loss(reduction: int) -> None:
    batch = Batch()
    labels = torch.tensor([[1, 3, -1, 0], [-1, 2, 2, 2], [0, 1, 2, 3]])
    with_nan = torch.tensor([0.5, 1.0, float("nan"), 2.0])
    inputs = (torch.randn(3, 4), labels), (torch.randn(4), labels[0]), (with_nan, labels[0])
    for x, target in inputs:
        batch.add("aten::multilabel_margin_loss_forward", x, target, reduction)
        loss, is_target = torch.ops.aten.multilabel_margin_loss_forward(x, target, reduction)
        arguments = (torch.randn_like(loss), x, target, reduction, is_target)
        batch.add("aten::multilabel_margin_loss_backward", *arguments)
    batch.check()


@pytest.mark.parametrize("concatenated", [False, True])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss(concatenated: bool, zero_infinity: bool) -> None:
    """Repeated labels, an empty target, and one that is too long for its input."""
    log_probs = torch.randn(6, 4, 5).log_softmax(2)
    targets = torch.tensor([[1, 1, 2], [3, 4, 1], [0, 0, 0], [1, 1, 1]])
    inputs, lengths = [6, 5, 4, 3], [3, 2, 0, 3]
    if concatenated:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    rest = (targets, inputs, lengths)
    losses, log_alpha = torch.ops.aten._ctc_loss(log_probs, *rest, 0, zero_infinity)
    (got, _) = run("aten::_ctc_loss", log_probs, *rest, 0, zero_infinity)
    torch.testing.assert_close(got, losses)
    assert math.isinf(losses[3])
    grad = torch.randn(4)
    arguments = (grad, log_probs, *rest, losses, log_alpha, 0, zero_infinity)
    wanted = torch.ops.aten._ctc_loss_backward(*arguments)
    (got,) = run("aten::_ctc_loss_backward", *arguments)
    reachable = slice(0, 4 if zero_infinity else 3)
    torch.testing.assert_close(got[:, reachable], wanted[:, reachable])
    for sample, end in enumerate(inputs):
        assert not got[end:, sample].any(), "what is behind the end has no gradient, reached or not"
