"""Sizes and numbers of fake quantization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazyxla.argument_checks.tables import AFTER, BEFORE, Arguments, checks, require

_WHOLE = ("fake_quantize_per_tensor_affine_cachemask", "_fake_quantize_learnable_per_tensor_affine")
_WHOLE_OF_TENSORS = "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams"
_OF_CHANNELS = (
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_learnable_per_channel_affine",
)
_GAP = " " * 8  # in PyTorch's message


def _check_order(a: Arguments) -> None:
    require(
        a["quant_min"] <= a["quant_max"],
        f"`quant_min` should be less than or {_GAP}equal to `quant_max`.",
    )


def _check_zero_included(a: Arguments, message: str) -> None:
    require(a["quant_min"] <= 0 <= a["quant_max"], message)


@checks(BEFORE, *_WHOLE, _WHOLE_OF_TENSORS)
def _of_tensor(a: Arguments) -> None:
    _check_order(a)
    if isinstance(a["zero_point"], int):
        require(
            a["quant_min"] <= a["zero_point"] <= a["quant_max"],
            "`zero_point` must be between `quant_min` and `quant_max`.",
        )


@checks(AFTER, _WHOLE_OF_TENSORS)
def _of_one_element(a: Arguments, _: Sequence[int]) -> None:
    for name in ("scale", "zero_point", "fake_quant_enabled"):
        count = a[name].numel()
        require(count == 1, f"a Tensor with {count} elements cannot be converted to Scalar")


def _check_channels(a: Arguments) -> None:
    x, scale, zero, axis = a["self"], a["scale"], a["zero_point"], a["axis"]
    require(scale.dim() == 1, "scale should be a 1-D tensor")
    require(zero.dim() == 1, "zero point should be a 1-D tensor")
    require(scale.numel() == zero.numel(), "scale and zero-point need to have the same dimensions")
    require(
        scale.numel() == x.size(axis),
        "dimensions of scale and zero-point are not consistent with input tensor",
    )


def _check_axis(a: Arguments) -> None:
    require(a["axis"] >= 0, "`axis` must be between 0 and number of dimensions of input")


@checks(BEFORE, *_OF_CHANNELS)
def _of_channels(a: Arguments) -> None:
    _check_channels(a)
    _check_order(a)
    _check_axis(a)


def _check_gradient(a: Arguments, narrow: bool) -> None:
    """`narrow`: bfloat16 is taken, too."""
    taken = (torch.float32, torch.bfloat16) if narrow else (torch.float32,)
    for name in ("grad", "self", "scale", "zero_point"):
        require(
            a[name].dtype in taken,
            "the gradients of a learned scale and zero point are computed in float32, but "
            f"{name} is of {a[name].dtype}",
        )
    require(a["self"].shape == a["grad"].shape, "`X` and `dY` are not the same size")


@checks(BEFORE, "_fake_quantize_learnable_per_tensor_affine_backward")
def _gradient_of_tensor(a: Arguments) -> None:
    _check_gradient(a, narrow=False)
    _check_zero_included(
        a,
        f"`quant_min` should be less than or {_GAP}equal to `quant_max`, and the quantization "
        "range should include 0.",
    )


@checks(BEFORE, "_fake_quantize_learnable_per_channel_affine_backward")
def _gradient_of_channels(a: Arguments) -> None:
    _check_gradient(a, narrow=True)
    _check_zero_included(a, "Expecting `quant_min` <= 0 and `quant_max` >= 0")
    _check_channels(a)
    _check_axis(a)
