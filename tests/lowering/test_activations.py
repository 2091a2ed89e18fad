"""Gradients of activations, gates, losses, and special functions."""

from typing import Any

import pytest
import torch

from tests.lowering.batch import FLOATS, Batch, each

SPECIAL = [
    "digamma",
    "i0",
    "special_i0e",
    "special_i1",
    "special_i1e",
    "special_entr",
    "special_log_ndtr",
    "special_ndtri",
    "special_erfcx",
    "special_modified_bessel_i0",
    "special_modified_bessel_i1",
]


@pytest.mark.parametrize("op", SPECIAL)
def test_special(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = torch.tensor([-2.5, -1.5, -0.3, 0.0, 0.2, 0.5, 0.9, 1.0, 3.0, 7.5, 9.5, 25.0]).to(dtype)
        batch.add(f"aten::{op}", x)

    each((torch.float32, torch.float64), call)


def test_special_with_two_operands() -> None:
    x = torch.tensor([0.5, 1.0, 2.5, 7.0])
    batch = Batch()
    for op in ("igamma", "igammac"):
        batch.add(f"aten::{op}", x.unsqueeze(1), x)
    batch.add("aten::special_zeta", x.unsqueeze(1) + 1, x)
    batch.add("aten::mvlgamma", x + 2, 3)
    batch.add("aten::mvlgamma", x + 40, 60)
    batch.add("aten::frexp.Tensor", torch.tensor([0.0, 1.0, -3.5, 1e-3, 1e10]))
    batch.check()


_GRADIENTS: dict[str, tuple[Any, ...]] = {
    "threshold_backward": (0.5,),
    "leaky_relu_backward": (0.2, False),
    "elu_backward": (),
    "sigmoid_backward": (),
    "tanh_backward": (),
    "softplus_backward": (1.5, 3.0),
    "gelu_backward": (),
    "hardtanh_backward": (-1.0, 1.0),
    "hardswish_backward": (),
    "hardsigmoid_backward": (),
    "hardshrink_backward": (0.5,),
    "softshrink_backward": (0.5,),
    "logit_backward": (),
    "silu_backward": (),
    "mish_backward": (),
}


@pytest.mark.parametrize("op", _GRADIENTS)
def test_gradients(op: str) -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        x = torch.tensor([-7.0, -3.0, -1.0, -0.5, -0.2, 0.0, 0.3, 0.5, 1.0, 2.0, 3.0, 7.0]).to(
            dtype
        )
        grad = torch.linspace(-1, 2, 12).to(dtype)
        if op == "elu_backward":
            for is_result in (False, True):
                args = (1.5, 0.7, 0.3 if not is_result else 1.0, is_result)
                batch.add(f"aten::{op}", grad, *args, x)
            return
        batch.add(f"aten::{op}", grad, x, *_GRADIENTS[op])
        if op == "gelu_backward":
            batch.add(f"aten::{op}", grad, x, approximate="tanh")
        if op == "logit_backward":
            batch.add(f"aten::{op}", grad, x, 0.2)

    each(FLOATS, call)


def test_gates() -> None:
    def call(batch: Batch, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(4, 6, generator=generator).to(dtype)
        for dim, half in ((-1, x[:, :3]), (0, x[:2])):
            batch.add("aten::glu", x, dim)
            # The CPU's 16-bit results were measured up to 7 units of the last place off.
            batch.add("aten::glu_backward", half, x, dim, rounded_once=True)
        batch.add("aten::_prelu_kernel_backward", x, x.flip(0), x[:1])
        batch.add("aten::log_sigmoid_forward", x)
        buffer = torch.exp(-x.abs())
        batch.add("aten::log_sigmoid_backward", x.flip(0), x, buffer)
        noise = torch.rand(4, 6, generator=generator).to(dtype)
        for training in (False, True):
            args = (x, x.flip(1), noise, 0.1, 0.3, training, False)
            batch.add("aten::rrelu_with_noise_backward", *args)

    each(FLOATS, call)


def test_losses() -> None:
    dtype = torch.float32
    generator = torch.Generator().manual_seed(0)
    x, target, weight = (torch.rand(3, 4, generator=generator).to(dtype) for _ in range(3))
    batch = Batch()
    for reduction in (0, 1, 2):
        grad = torch.ones(3, 4).to(dtype) if reduction == 0 else torch.tensor(2.0).to(dtype)
        for name, parameters in (
            ("mse_loss", ()),
            ("smooth_l1_loss", (0.3,)),
            ("huber_loss", (0.3,)),
            ("soft_margin_loss", ()),
        ):
            batch.add(f"aten::{name}", x * 2, target, reduction, *parameters)
            batch.add(f"aten::{name}_backward", grad, x * 2, target, reduction, *parameters)
        batch.add("aten::smooth_l1_loss", x, target, reduction, 0.0)
        for w in (None, weight):
            batch.add("aten::binary_cross_entropy", x, target, w, reduction)
            batch.add("aten::binary_cross_entropy_backward", grad, x, target, w, reduction)
            for pos_weight in (None, weight[0]):
                args = (x * 4 - 2, target, w, pos_weight, reduction)
                batch.add("aten::binary_cross_entropy_with_logits", *args)
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    batch.add("aten::binary_cross_entropy", ends, ends.flip(0))
    batch.check()
