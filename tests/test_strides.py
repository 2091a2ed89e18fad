"""Results have the strides that PyTorch's CPU gives, whatever the layout of the arguments.

Nothing is executed: strides are known when a call is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from tests.support import DEVICE, counted

aten = torch.ops.aten


def _permuted(order: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same tensor with its dimensions in this order in memory."""

    def place(x: torch.Tensor) -> torch.Tensor:
        back = [order.index(d) for d in range(x.ndim)]
        return x.permute(order).contiguous().permute(back)

    return place


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.clone,
    "reversed": lambda x: _permuted([*range(x.ndim)][::-1])(x),
    "transposed": lambda x: _permuted([*range(x.ndim - 2), x.ndim - 1, x.ndim - 2])(x),
    "channels last": lambda x: _permuted([0, *range(2, x.ndim), 1])(x),
    "stepped": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


def _empty_out(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: call(x, y, out=torch.empty(0, device=x.device))


# Of two tensors of the same shape.
PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copysign": torch.copysign,
    "copysign by a number": lambda x, y: torch.copysign(x, 2),
    "floor_divide": torch.floor_divide,
    "floor_divide by a number": lambda x, y: x // 2,
    "div": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "heaviside": torch.heaviside,
    "logaddexp": torch.logaddexp,
    "logical_and": torch.logical_and,
    "ldexp": torch.ldexp,
    "ldexp of integers": lambda x, y: torch.ldexp(x, y.long()),
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "complex": torch.complex,
    "polar": torch.polar,
    "angle": lambda x, y: torch.angle(torch.complex(x, y)),
    "pow": lambda x, y: 2**x,
    "isin": torch.isin,
    "normal": torch.normal,
    "normal of a number": lambda x, y: torch.normal(1.0, x),
    "poisson": lambda x, y: torch.poisson(x),
    "standard_gamma": lambda x, y: torch._standard_gamma(x),
    "rrelu": lambda x, y: F.rrelu(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "logcumsumexp": lambda x, y: x.logcumsumexp(0),
    "roll": lambda x, y: torch.roll(x, 1, 1),
    "roll of all": lambda x, y: torch.roll(x, 1),
    "huber_loss": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
    "batch_norm": lambda x, y: F.batch_norm(x, None, None, training=True),
    "evaluated batch_norm": lambda x, y: F.batch_norm(x, x.new_ones(3), x.new_ones(3)),
    "irfft": lambda x, y: torch.fft.irfft(x, dim=1),
    "hfftn": lambda x, y: torch.fft.hfftn(x, dim=(-1, 0)),
    "rfftn": lambda x, y: torch.fft.rfftn(x, dim=(0, 1)),
    "fftn": lambda x, y: torch.fft.fftn(x),
    "gradient of mse_loss": lambda x, y: aten.mse_loss_backward(x, x, y, 0),
    "gradient of smooth_l1_loss": lambda x, y: aten.smooth_l1_loss_backward(x, x, y, 0, 1.0),
    "gradient of elu": lambda x, y: aten.elu_backward(x, 1, 1, 1, False, y),
    "gradient of hardtanh": lambda x, y: aten.hardtanh_backward(x, y, 0, 1),
    "gradient of dropout": lambda x, y: aten.native_dropout_backward(x, y > 0.5, 2.0),
    "gradient of glu": lambda x, y: aten.glu_backward(x[:, :, :2], y, 2),
    "gradient of log_softmax": lambda x, y: aten._log_softmax_backward_data(x, y, 1, x.dtype),
    "out= of add": _empty_out(torch.add),
    "out= of copysign": _empty_out(torch.copysign),
    "out= of mul by a number": _empty_out(lambda x, y, out: torch.mul(x, 2, out=out)),
    "out= of cat": _empty_out(lambda x, y, out: torch.cat([x, y], out=out)),
    "out= of sort": lambda x, y: torch.sort(
        x, 1, out=(x.new_empty(0), x.new_empty(0, dtype=torch.long))
    ),
    "out= of stack": _empty_out(lambda x, y, out: torch.stack([x, y], out=out)),
    "out= of geqrf": lambda x, y: torch.geqrf(x, out=(x.new_empty(0), x.new_empty(0))),
    "out= of fft": lambda x, y: torch.fft.fft(x, out=x.new_empty(0, dtype=torch.cfloat)),
}


def _significant(results: Any) -> list[tuple[list[int], list[int], torch.dtype, int]]:
    """Sizes, strides, dtypes and offsets; a dimension of one element has no stride."""
    return [
        (
            list(x.shape),
            [s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)],
            x.dtype,
            x.storage_offset(),
        )
        for x in tree_leaves(results)
    ]


def _on_device(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), device=DEVICE)


@pytest.mark.parametrize("name", PAIRS)
def test_strides_of_pairs(name: str) -> None:
    call = PAIRS[name]
    x, y = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5)
    with counted() as n:
        for first in LAYOUTS:
            for second in LAYOUTS:
                given = LAYOUTS[first](x), LAYOUTS[second](y)
                expected = _significant(call(*given))
                found = _significant(call(*map(_on_device, given)))
                assert found == expected, f"{first}, {second}"
    assert n.executions == n.fallbacks == 0


@pytest.mark.parametrize("name", ["copysign", "floor_divide", "logaddexp", "logical_or", "xlogy"])
def test_strides_of_broadcast_pairs(name: str) -> None:
    for place in LAYOUTS.values():
        given = place(torch.rand(3, 1, 5)), place(torch.rand(2, 3, 4, 5))[0, 0]
        call = getattr(torch, name)
        assert _significant(call(*map(_on_device, given))) == _significant(call(*given))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_gradients_of_linear(layout: str) -> None:
    def gradients(x: torch.Tensor, weight: torch.Tensor) -> Any:
        operands = x.requires_grad_(), weight.requires_grad_()
        return torch.autograd.grad(F.linear(*operands).sum(), operands)

    x, weight = torch.rand(3, 4), torch.rand(5, 4)
    for given in [(x, LAYOUTS[layout](weight)), (LAYOUTS[layout](x), weight)]:
        on_device = [_on_device(t) for t in given]
        assert _significant(gradients(*on_device)) == _significant(gradients(*given))


def _gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """The results and the gradients of all tensors."""

    def run(*given: torch.Tensor) -> Any:
        operands = [x.detach().requires_grad_() for x in given]
        result = call(*operands)
        return result, torch.autograd.grad(result.sum(), operands)

    return run


@pytest.mark.parametrize("call", [F.conv1d, F.conv_transpose1d])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_convolutions_in_one_dimension(call: Callable[..., Any], layout: str) -> None:
    for other in LAYOUTS.values():
        given = LAYOUTS[layout](torch.rand(2, 3, 7)), other(torch.rand(3, 3, 2))
        on_device = map(_on_device, given)
        assert _significant(_gradients(call)(*on_device)) == _significant(_gradients(call)(*given))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 2, 3, 0), (3, 2, 1, 0)])
def test_strides_of_pooling_of_one_sample(order: tuple[int, ...]) -> None:
    def pooled(x: torch.Tensor) -> Any:
        return F.max_pool3d(x, 2, return_indices=True)

    def gradients(x: torch.Tensor) -> Any:
        return _gradients(lambda x: F.max_pool3d(x, 2).square())(x)

    x = _permuted([*order])(torch.rand(3, 4, 5, 6))
    for call in (pooled, gradients, _gradients(lambda x: F.max_pool3d(x, 2))):
        assert _significant(call(_on_device(x))) == _significant(call(x))


def test_strides_of_what_the_host_computes() -> None:
    def solved(a: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(a, a.mT @ a).solution

    a = torch.rand(3, 3)
    assert _significant(solved(a.to(DEVICE))) == _significant(solved(a))
