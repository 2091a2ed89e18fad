"""Operators of batch normalization that cannot be recorded as they are.

Some write running statistics, and their schemas declare no writes. Each is made of others here:
numbers for each channel, of which there are few. (native_batch_norm, which every model calls, is in
csrc/dispatch/batch_norm.cpp.) The out= forms have running statistics and results to write to: they
assign the results of the functional ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("aten", "IMPL")


def _move(running: Tensor | None, new: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_((1 - momentum) * running + momentum * new)


def _gather_stats_with_counts(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) over the batches of all processes, of shape (channels,).

    `mean` and `rstd` are those of each process's batch, of shape (processes, channels), `counts`
    how many values of a channel each has.
    """
    counts = counts.to(mean.dtype).reshape(-1, 1)
    total = counts.sum()
    average = (mean * counts).sum(0) / total
    variances = rstd.reciprocal().square() - eps
    squares = ((variances + (mean - average).square()) * counts).sum(0)
    _move(running_mean, average, momentum)
    _move(running_var, squares / (total - 1), momentum)
    return average, (squares / total + eps).rsqrt()


def _gather_stats(x: Tensor, mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The same, where all batches have as many values."""
    *others, count = rest
    others.append(mean.new_full((mean.shape[0],), count))
    return _gather_stats_with_counts(x, mean, *others)


def _update_stats(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the batch, of shape (channels,)."""
    dtype = x.dtype if running_mean is None else running_mean.dtype
    dims = [0, *range(2, x.dim())]
    x = x.to(dtype)
    variance, mean = torch.var_mean(x, dims, correction=0)
    _move(running_mean, mean, momentum)
    _move(running_var, x.var(dims, correction=1), momentum)
    return mean, variance


def _assigned(op: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The out= form of an operator."""

    def out_form(
        *args: Any, out: Tensor, save_mean: Tensor, save_invstd: Tensor
    ) -> tuple[Tensor, ...]:
        outputs = (out, save_mean, save_invstd)
        for output, result in zip(outputs, op(*args), strict=True):
            torch._prims_common.wrappers._maybe_resize_out(output, result.shape)
            output.copy_(result)
        return outputs

    return out_form


def install() -> None:
    """Registers the operators for the device. Once per process."""
    aten = torch.ops.aten
    for name, function in (
        ("batch_norm_gather_stats", _gather_stats),
        ("batch_norm_gather_stats_with_counts", _gather_stats_with_counts),
        ("batch_norm_update_stats", _update_stats),
        ("native_batch_norm.out", _assigned(aten.native_batch_norm.default)),
        ("_native_batch_norm_legit.out", _assigned(aten._native_batch_norm_legit.default)),
    ):
        _library.impl(name, function, "PrivateUse1")
