"""Checks of tensors' values, a debug setting (LAZYXLA_CHECK_INDICES).

An index tensor's values are data, unknown while recording. XLA clamps an index that is out of
range, so that a wrong one gives wrong numbers and no error. With the setting on, every operator
that takes indices reads them first and raises the error that PyTorch's CPU kernels raise, at the
call; that runs what is recorded, each time. Other values that only kernels check are treated alike:
the weights of multinomial, the number of elements that masked_scatter takes, the probabilities of
binary_cross_entropy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lazyxla.argument_checks.tables import VALUES, Arguments

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)

# The kernel itself is called.
_ON_CPU = (
    *("multinomial", "masked_scatter", "nll_loss_forward", "nll_loss2d_forward", "bernoulli"),
    *("bernoulli.Tensor", "poisson", "binomial"),
    *("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
    *("binary_cross_entropy", "multi_margin_loss", "multilabel_margin_loss_forward"),
    *("max_unpool2d", "max_unpool3d", "segment_reduce", "lu_unpack", "searchsorted.Tensor"),
    *("_embedding_bag", "_embedding_bag_forward_only"),
    *("fake_quantize_per_channel_affine_cachemask", "_fused_moving_avg_obs_fq_helper_functional"),
)
# With one index tensor along `dim`.
_ALONG_DIM = (
    *("gather", "index_select", "index_add", "index_copy", "index_reduce", "scatter.src"),
    *("scatter.value", "scatter.reduce", "scatter.value_reduce", "scatter_add"),
    "scatter_reduce.two",
)
# The same, where negative indices count from the end.
_ALONG_DIM_FROM_END = ("index_fill.int_Scalar", "index_fill.int_Tensor")
# With an index tensor, or none, for each dimension.
_OF_EACH_DIM = ("index.Tensor", "_unsafe_index.Tensor", "index_put", "_index_put_impl")


def _call_on_cpu(name: str, a: Arguments) -> None:
    packet, _, overload = name.partition(".")
    if isinstance(a.get("out"), Tensor):  # which may be wrong, too
        overload = f"{overload}_out" if overload else "out"
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    taken = {arg.name for arg in op._schema.arguments if arg.name != "generator"}
    given = {key: value for key, value in a.items() if key in taken}
    with torch.random.fork_rng(devices=[]):
        op(**tree_map_only(Tensor, Tensor.cpu, given))


def _check_range(
    name: str, a: Arguments, index: Any, dim: int, size: int, from_end: bool = False
) -> None:
    if index is None or index.numel() == 0 or index.dtype not in _INTEGERS:
        return
    low, high = (int(bound) for bound in torch.aminmax(index.cpu()))
    if (-size if from_end else 0) <= low and high < size:
        return
    _call_on_cpu(name, a)  # it has PyTorch's own words
    wrong = high if high >= size else low
    raise IndexError(
        f"index {wrong} is out of bounds for dimension {dim} with size {size} (in aten::{name})"
    )


def _check_along_dim(name: str, a: Arguments, from_end: bool = False) -> None:
    x = a["self"]
    dim = a["dim"] % max(x.dim(), 1)
    _check_range(name, a, a["index"], dim, x.size(dim) if x.dim() else 1, from_end)


def _check_each_dim(name: str, a: Arguments) -> None:
    for dim, index in enumerate(a["indices"]):
        if index is not None:
            _check_range(name, a, index, dim, a["self"].size(dim), from_end=True)


def _check_flattened(name: str, a: Arguments) -> None:
    _check_range(name, a, a["index"], 0, a["self"].numel(), from_end=True)


def _check_rows(name: str, a: Arguments) -> None:
    _check_range(name, a, a["indices"], 0, a["weight"].size(0))


def _check_classes(a: Arguments) -> None:
    target = a["target"].cpu()
    bad = ((target < 0) | (target >= a["input"].size(1))) & (target != a["ignore_index"])
    if bad.any():
        raise IndexError(f"Target {int(target[bad][0])} is out of bounds.")


def _enter() -> None:
    kinds: dict[Callable[[str, Arguments], None], tuple[str, ...]] = {
        _call_on_cpu: _ON_CPU,
        _check_along_dim: _ALONG_DIM,
        functools.partial(_check_along_dim, from_end=True): _ALONG_DIM_FROM_END,
        _check_each_dim: _OF_EACH_DIM,
        _check_flattened: ("take", "put"),
        _check_rows: ("embedding",),
    }
    for check, names in kinds.items():
        for name in names:
            VALUES[f"aten::{name}"] = functools.partial(check, name)
    VALUES["lazyxla::cross_entropy"] = _check_classes


_enter()
