"""Sizes that do not fit each other."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import canonicalize_dim

from lazyxla.argument_checks.tables import (
    AFTER,
    BEFORE,
    Arguments,
    checks,
    dtype_name,
    named,
    require,
)


@checks(AFTER, "linear")
def _linear(a: Arguments, _: Sequence[int]) -> None:
    weight, bias = a["weight"], a["bias"]
    if bias is not None and weight.dim() == 2:
        rows = a["input"].shape[:-1] or [1]
        torch.empty(bias.shape, device="meta").expand(*rows, weight.size(0))


@checks(AFTER, "_softmax_backward_data", "_log_softmax_backward_data")
def _softmax_backward(a: Arguments, _: Sequence[int]) -> None:
    grad, output = a["grad_output"].shape, a["output"].shape
    require(
        grad == output,
        "Expected tensor for argument #1 'grad' to have same size as tensor for argument #2 "
        f"'output'; but {list(grad)} does not equal {list(output)}",
    )


@checks(AFTER, "native_group_norm")
def _group_norm(a: Arguments, _: Sequence[int]) -> None:
    x, n, channels, rest = a["input"], a["N"], a["C"], a["HxW"]
    require(
        min(n, rest) >= 0 and n * channels * rest == x.numel(),
        f"Expected X.numel() == N * C * HxW to be true, but got X of shape {list(x.shape)}, "
        f"N = {n}, C = {channels}, HxW = {rest}",
    )
    for name in ("weight", "bias"):
        tensor = a[name]
        if tensor is None:
            continue
        require(
            tensor.dim() == 1 and tensor.numel() == channels,
            f"Expected {name} to be a vector of size equal to the number of channels in input, "
            f"but got {name} of shape {list(tensor.shape)} and input of shape {list(x.shape)}",
        )


@checks(BEFORE, *named("batch_norm"))
def _batch_norm(a: Arguments) -> None:
    """PyTorch's kernel would read beyond the end of tensors that are too short."""
    x = a["input"]
    if x.dim() == 1:
        raise IndexError("Dimension out of range (expected to be in range of [-1, 0], but got 1)")
    if x.dim() == 0:
        return  # others refuse that
    for name in ("weight", "bias", "running_mean", "running_var"):
        if (tensor := a.get(name)) is not None:
            require(
                tensor.numel() == x.size(1),
                f"{name} should contain {x.size(1)} elements not {tensor.numel()}",
            )
    if "eps" in a and "running_mean" in a:
        _batch_norm_kernel(a)


def _batch_norm_kernel(a: Arguments) -> None:
    """How many dimensions parameters and statistics may have, the CPU's kernel knows. It is asked
    about two elements of one dtype, since more mixes of dtypes are taken here."""
    x = a["input"]

    def alike(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return tensor if tensor is None else _zeros([1] * tensor.dim(), x.dtype)

    if x.numel() == 0:
        return  # nor does the kernel look at it
    given = [alike(a.get(name)) for name in ("weight", "bias", "running_mean", "running_var")]
    training = a.get("training", False) or given[2] is None
    some = _zeros([2, *[1] * (x.dim() - 1)], x.dtype)
    torch.ops.aten.native_batch_norm(some, *given, training, 0.5, 1.0)


def _in_place(shape: Sequence[int], other: Sequence[int]) -> None:
    """Whether a tensor of this shape can take the result with one of another."""
    broadcast = torch.broadcast_shapes(other, shape)
    require(
        broadcast == shape,
        f"output with shape {list(shape)} doesn't match the broadcast shape {list(broadcast)}",
    )


@checks(AFTER, "soft_margin_loss")
def _soft_margin_loss(a: Arguments, _: Sequence[int]) -> None:
    _in_place(a["self"].shape, a["target"].shape)


@checks(AFTER, "binary_cross_entropy_with_logits")
def _of_target(a: Arguments, _: Sequence[int]) -> None:
    """The CPU's kernel multiplies with these in place."""
    for name in ("pos_weight", "weight", "self"):
        if a[name] is not None:
            _in_place(a["target"].shape, a[name].shape)


@checks(AFTER, "addmv")
def _addmv(a: Arguments, _: Sequence[int]) -> None:
    x, matrix, vector = a["self"], a["mat"], a["vec"]
    require(
        x.dim() <= 1,
        f"vector + matrix @ vector expected, got {x.dim()}, {matrix.dim()}, {vector.dim()}",
    )
    require(
        x.numel() in (1, matrix.size(0)),
        f"size mismatch, got input ({x.numel()}), mat ({matrix.size(0)}x{matrix.size(1)})",
    )


def _cumulative(name: str, a: Arguments, _: Sequence[int]) -> None:
    if a["self"].dim() == 0 and a["dim"] not in (0, -1):
        raise IndexError(f"{name}(): Expected reduction dim -1 or 0 for scalar but got {a['dim']}")


for _name in ("cummax", "cummin"):
    AFTER[f"aten::{_name}"] = functools.partial(_cumulative, _name)


@checks(AFTER, "ormqr")
def _householder(a: Arguments, _: Sequence[int]) -> None:
    side = -2 if a["left"] else -1
    most = min(a["input3"].size(side), a["self"].size(-1))
    require(
        a["input2"].size(-1) == most,
        f"torch.ormqr: tau.shape[-1] must be equal to min(other.shape[{side}], input.shape[-1])",
    )


@checks(AFTER, "linalg_lu", "linalg_lu_factor_ex")
def _pivots(a: Arguments, _: Sequence[int]) -> None:
    """The CPU's kernel, which computes this, has no other way than with pivots."""
    if not a["pivot"] and a["A"].numel() > 0:
        torch.linalg.lu_factor_ex(_zeros((1, 1), a["A"].dtype), pivot=False)


@checks(BEFORE, "lu_unpack")
def _lu_unpack(a: Arguments) -> None:
    """PyTorch's kernel would read beyond the end of the pivots."""
    lu, pivots = a["LU_data"], a["LU_pivots"]
    if lu.dim() < 2:
        return  # others refuse that
    batch = lu.shape[:-2]
    fits = pivots.dim() == lu.dim() - 1 and pivots.shape[:-1] == batch
    require(
        fits and pivots.size(-1) >= min(lu.shape[-2:]),
        f"torch.lu_unpack: LU_pivots of shape {list(pivots.shape)} does not fit LU_data of "
        f"shape {list(lu.shape)}",
    )


@checks(BEFORE, "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _recurrent_cell(a: Arguments) -> None:
    """The CPU adds the biases in linear layers, which refuse those of other sizes."""
    for side in ("input", "hidden"):
        bias = a[f"{side}_bias"]
        if bias is not None:
            torch.empty(bias.shape, device="meta").expand(a[f"{side}_gates"].shape)


@checks(BEFORE, "histogram.bins_tensor", "histogram.bin_ct")
def _histogram(a: Arguments) -> None:
    """The CPU's own checks, which see of the input no more than whether the weights fit it."""
    x, bins, weight, hist = a["self"], a["bins"], a["weight"], a.get("hist")
    fits = weight is None or weight.numel() == x.numel()
    options: dict[str, Any] = {"weight": None if weight is None else _zeros(1, weight.dtype)}
    if not isinstance(bins, int):
        bins = _zeros(bins.shape, bins.dtype)
    elif a["range"] is not None:
        options["range"] = a["range"]
    if hist is not None:
        options["out"] = _zeros(0, hist.dtype), _zeros(0, a["bin_edges"].dtype)
    torch.histogram(_zeros(1, x.dtype), bins, **options)
    require(
        fits,
        "torch.histogramdd: if weight tensor is provided it should have the same shape as the "
        f"input tensor excluding its innermost dimension, but got input with shape [{x.numel()}, "
        f"1] and weight with shape [{0 if weight is None else weight.numel()}]",
    )


def _zeros(sizes: int | Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, device="cpu")


@checks(BEFORE, "segment_reduce")
def _segments(a: Arguments) -> None:
    """The CPU's kernel is asked about a segment of one element."""
    segments: dict[str, Any] = {
        name: torch.tensor(one, dtype=a[name].dtype, device="cpu")
        for name, one in (("lengths", [1]), ("indices", [0]), ("offsets", [0, 1]))
        if a.get(name) is not None
    }
    torch.segment_reduce(_zeros(1, a["data"].dtype), a["reduce"], **segments)
    name = "lengths" if a["lengths"] is not None else "offsets"
    if (given := a.get(name)) is None or given.dim() == 0:
        return
    dims, last = a["data"].dim(), given.dim() - 1
    axis = canonicalize_dim(dims, a["axis"])
    require(
        dims > last,
        f"Expected data.dim() >= {name}_value.dim() to be true, but got false.  (Could this error "
        "message be improved?  If so, please report an enhancement request to PyTorch.)",
    )
    require(
        axis == last,
        f"segment_reduce(): Expected axis to be the last dimension of {name} but got {axis}.",
    )


@checks(AFTER, "rrelu_with_noise", "rrelu_with_noise_functional")
def _noise(a: Arguments, _: Sequence[int]) -> None:
    x, noise = list(a["self"].shape), list(a["noise"].shape)
    require(
        x == noise,
        "noise tensor shape must match self tensor shape. "
        f"Got self.shape = {x} noise.shape = {noise}",
    )


@checks(BEFORE, "multinomial")
def _multinomial(a: Arguments) -> None:
    weights, samples = a["self"], a["num_samples"]
    if (out := a.get("out")) is not None:
        require(
            out.dtype is torch.int64,
            f"multinomial expects Long tensor out, got: {dtype_name(out.dtype)}",
        )
    require(weights.dim() in (1, 2), "prob_dist must be 1 or 2 dim")
    require(
        weights.is_floating_point(),
        "multinomial only supports floating-point dtypes for input, got: "
        f"{dtype_name(weights.dtype)}",
    )
    require(samples > 0, "cannot sample n_sample <= 0 samples")
    require(
        a["replacement"] or samples <= weights.size(-1),
        "cannot sample n_sample > prob_dist.size(-1) samples without replacement",
    )
    # float32 counts exactly up to here.
    require(weights.size(-1) <= 2**24, "number of categories cannot exceed 2^24")
