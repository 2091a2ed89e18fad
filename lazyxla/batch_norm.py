"""Operators of batch normalization that write running statistics without saying so.

Their schemas declare no writes, so that they cannot be recorded as they are. Each is made of others
here: numbers for each channel, of which there are few.
"""

from __future__ import annotations

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


def install() -> None:
    """Registers the operators for the device. Once per process."""
    for name, function in (
        ("batch_norm_gather_stats", _gather_stats),
        ("batch_norm_gather_stats_with_counts", _gather_stats_with_counts),
        ("batch_norm_update_stats", _update_stats),
    ):
        _library.impl(name, function, "PrivateUse1")
