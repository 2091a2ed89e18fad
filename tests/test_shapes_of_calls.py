"""Tensors of other shapes than an operator takes: refused as on PyTorch's CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.support import DEVICE, assert_same, counted, error_of, on_device

ONE, TWO, MATRIX = torch.ones(()), torch.ones(2), torch.ones(2, 2)
FIRST = torch.tensor([0])

CALLS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "addmv of a number": (torch.addmv, (ONE, MATRIX, TWO)),
    "addmv of a matrix": (torch.addmv, (MATRIX[:1], MATRIX, TWO)),
    "cummax of a number": (lambda x: torch.cummax(x, 1), (ONE,)),
    "cummin of a number": (lambda x: torch.cummin(x, -2), (ONE,)),
    "index_reduce of a row": (
        lambda x, i, y: torch.index_reduce(x, 0, i, y, "prod"),
        (TWO, FIRST, MATRIX),
    ),
    "index_reduce, a matrix of indices": (
        lambda x, i, y: torch.index_reduce(x, 0, i, y, "prod"),
        (TWO, FIRST[None], TWO[:1]),
    ),
    "index_reduce of a number at two places": (
        lambda x, i, y: torch.index_reduce(x, 0, i, y, "prod"),
        (ONE, torch.tensor([0, 0]), ONE),
    ),
    "index_reduce along a dimension that is not there": (
        lambda x, i, y: torch.index_reduce(x, -2, i, y, "prod"),
        (TWO, torch.tensor([0, 1]), TWO),
    ),
    "index_copy, indices of floats": (
        lambda x, i, y: torch.index_copy(x, 0, i, y),
        (TWO, FIRST.float(), ONE),
    ),
    "transposed convolution of nothing": (
        lambda x, weight: F.conv_transpose1d(x, weight, output_padding=1),
        (torch.ones(0, 2, 2), torch.ones(2, 1, 1)),
    ),
    "histogram without bins": (lambda x: torch.histogram(x, 0)[0], (TWO,)),
    "multilabel_margin_loss, labels of floats": (F.multilabel_margin_loss, (MATRIX, MATRIX)),
    "pad that only crops, with a number that does not fit": (
        lambda x: F.pad(x, [-1, 0], value=1e40),
        (TWO,),
    ),
    "a bool that is filled with an imaginary number": (
        lambda x: torch.full_like(x, 1j, dtype=torch.bool),
        (TWO,),
    ),
    "searchsorted in a number": (torch.searchsorted, (ONE, ONE)),
    "linear, a bias of two dimensions": (F.linear, (TWO, MATRIX, MATRIX[:1])),
    "linear, a bias that is too long": (F.linear, (MATRIX, MATRIX, torch.ones(3))),
    "index_put, too many indices": (
        lambda x, i: torch.ops.aten.index_put(x, [i, i], torch.ones_like(x)[:1]),
        (TWO, FIRST),
    ),
    "index_put, indices of floats": (
        lambda x, i: torch.ops.aten.index_put(x, [i.float()], torch.ones_like(x)[:1]),
        (TWO, FIRST),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_refused_or_accepted_as_on_the_cpu(name: str) -> None:
    call, arguments = CALLS[name]
    try:
        expected = call(*arguments)
    except Exception as error:
        with pytest.raises(type(error)):
            call(*(x.to(DEVICE) for x in arguments))
    else:
        assert isinstance(expected, torch.Tensor)
        found = call(*(x.to(DEVICE) for x in arguments))
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found.cpu(), expected)


aten = torch.ops.aten

# Calls of PyTorch's operators, whose shapes the functions of torch.nn check before.
WIDE = torch.ones(3, 3, 3, 3, 3, 3)
REFUSED: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    **{
        f"{name}_pad{rank}d of {dims} dimensions": (
            lambda x, rank=rank, name=name: getattr(aten, f"{name}_pad{rank}d")(x, [1] * 2 * rank),
            (WIDE[(0,) * (6 - dims)],),
        )
        for name in ("reflection", "replication")
        for rank in (1, 2, 3)
        for dims in (rank, rank + 3)
    },
    **{
        f"upsample_{name} of {dims} dimensions": (
            lambda x, name=name, sizes=sizes: getattr(aten, f"upsample_{name}")(x, sizes, True),
            (WIDE[(0,) * (6 - dims)],),
        )
        for name, sizes in {"bilinear2d": [4] * 2, "trilinear3d": [4] * 3}.items()
        for dims in (len(sizes) + 1, len(sizes) + 3)
    },
    "rrelu_with_noise": (lambda x, n: aten.rrelu_with_noise(x, n), (MATRIX, TWO)),
    "rrelu_with_noise_": (lambda x, n: aten.rrelu_with_noise_(x, n), (TWO.clone(), ONE)),
    "binary_cross_entropy_with_logits": (
        torch.binary_cross_entropy_with_logits,
        (MATRIX, TWO),
    ),
    "segment_reduce, lengths of more dimensions": (
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n),
        (TWO, torch.tensor([[2]])),
    ),
    "segment_reduce along another axis": (
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n, axis=0),
        (MATRIX, torch.tensor([[2], [2]])),
    ),
    "segment_reduce along no axis": (
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n, axis=1),
        (TWO, torch.tensor([2])),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_the_cpus_words(name: str) -> None:
    call, arguments = REFUSED[name]
    kind, text = error_of(lambda: call(*arguments))
    assert kind in (RuntimeError, IndexError)
    with counted() as n:
        assert error_of(lambda: call(*on_device(arguments))) == (kind, text)
    assert n.compiles == n.fallbacks == 0


@pytest.mark.parametrize("shapes", [((), (1,)), ((1,), ()), ((1,), (1,))])
def test_a_label_of_one_class_may_be_a_number(shapes: tuple[tuple[int, ...], ...]) -> None:
    x, target = torch.ones(shapes[0]), torch.zeros(shapes[1], dtype=torch.int64)
    expected = aten.multilabel_margin_loss_forward(x, target, 1)
    with counted() as n:
        assert_same(aten.multilabel_margin_loss_forward(*on_device((x, target)), 1), expected)
    assert n.fallbacks == 0


@pytest.mark.parametrize("shape", [(36,), (1, 2, 6, 3), (6, 6), (2, 6, 3)])
def test_groups_are_normalized_in_any_shape(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(6), torch.randn(6)
    expected = torch.native_group_norm(x, weight, bias, 2, 6, 3, 2, 1e-5)
    with counted() as n:
        found = torch.native_group_norm(*on_device((x, weight, bias)), 2, 6, 3, 2, 1e-5)
        assert_same(found, expected)
    assert n.fallbacks == 0


@pytest.mark.parametrize("shape", [(1, 6, 5, 4), (4, 6, 5, 4), (4, 6, 1, 3), (2, 6, 3, 4, 5)])
def test_group_norm_keeps_the_memory_format(shape):
    """Of nn.GroupNorm's gradient PyTorch makes a contiguous one on every device but the CPU."""
    format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x, grad = (torch.randn(shape).to(memory_format=format) for _ in range(2))
    sizes = (shape[0], 6, x[0, 0].numel())

    def run(x, grad):
        y, mean, rstd = torch.native_group_norm(x, None, None, *sizes, 3, 1e-5)
        backward = torch.ops.aten.native_group_norm_backward
        return y, backward(grad, x, mean, rstd, None, *sizes, 3, [True, False, False])[0]

    assert_same(run(*on_device((x, grad))), run(x, grad))
