"""Meta functions that torch lacks, and corrected ones, for tensors on the device.

Shapes are inferred by running operators on meta tensors. A few operators of torch have no meta
kernel though their result is plain from the arguments. A few have one that fails on calls that
kernels accept, or returns another shape than the CPU's kernel, which we follow.

Torch's own registrations stay as they are, since meta tensors and fake tensors of other devices use
them. Ours are operators of a namespace of their own: ``lazyxla_meta::nansum`` takes what
``aten::nansum`` takes and returns a tensor like its result. They are asked first

- by the recorder, for what is recorded on the device (``csrc/dispatch/infer.cpp``),
- by a fake tensor mode, where a tensor or the result is on the device: in ``torch.compile`` and
  other tracing,
- for the small calls that show how an operator lowers (``lazyxla/lowering/samples.py``).

Only these are asked: not for an operator that a kernel or a decomposition of torch calls within,
nor by a fake tensor mode for one that it takes apart before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from lazyxla.lowering.operators import META_NAMESPACE, find_op, on_meta, schema_of
from lazyxla.meta_attention import ATTENTION
from lazyxla.meta_quantization import QUANTIZATION
from lazyxla.meta_strides import STRIDES
from lazyxla.runtime import BACKEND

_own = torch.library.Library(META_NAMESPACE, "FRAGMENT")


def _writes_in_place(*args: Any, **kwargs: Any) -> None:
    """For operators that only write tensors of the shapes they have already."""


def _copies(count: int) -> Callable[..., tuple[list[torch.Tensor], ...]]:
    """For operators whose results are like the first of their arguments, which are lists."""

    def result(*args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], ...]:
        return tuple([torch.empty_like(x) for x in tensors] for tensors in args[:count])

    return result


def _like(position: int, **options: Any) -> Callable[..., torch.Tensor]:
    """For operators whose result is like one of their arguments."""

    def result(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.empty_like(args[position], **options)

    return result


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    # The workspace keeps the three gates, the old state and the new gate's hidden part.
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    batch, width = grad_hy.shape
    gates = [grad_hy.new_empty(batch, 3 * width) for _ in range(2)]
    biases = [grad_hy.new_empty(3 * width) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)


def _lstm_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, cx: torch.Tensor, *biases: Any
) -> tuple[torch.Tensor, ...]:
    # Torch's own fails without biases.
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def _linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, output_mask: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    # Torch's own makes gradients of weight and bias if one of the two is requested.
    weights, bias = grad.new_empty(grad.shape[-1], x.shape[-1]), grad.new_empty(grad.shape[-1])
    inputs = grad.new_empty(x.shape)
    # Products are computed in the order of the operand.
    if not weight.is_contiguous():
        weights = _column_major(weights)
    if x.ndim == 2 and not x.is_contiguous() and x.mT.is_contiguous():
        inputs = _column_major(inputs)
    made = inputs, weights, bias
    return tuple(t if wanted else None for t, wanted in zip(made, output_mask, strict=True))


def _multilabel_margin_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    # Torch's own returns an array of one loss for a single row, whose loss is a scalar.
    torch._check(
        x.ndim <= 2 and x.numel() > 0, lambda: f"Expected non-empty vector or matrix: {x.shape}"
    )
    is_label = target.ndim < 2 and x.ndim < 2 and target.numel() == x.numel() == 1
    torch._check(
        target.shape == x.shape or is_label,
        lambda: f"inconsistent size {target.shape} for input {x.shape}",
    )
    losses = x.shape[:1] if reduction == 0 and x.ndim == 2 else ()
    return x.new_empty(losses), torch.empty_like(target, dtype=x.dtype)


def _nansum(
    x: torch.Tensor,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # Torch's own reduces nothing if there are no dimensions, where kernels reduce all.
    torch._check(not x.is_complex(), lambda: "nansum on CPU does not support complex inputs")
    return torch.sum(x, dim, keepdim, dtype=dtype)


def _where(condition: torch.Tensor, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Torch's own refuses bytes, which kernels take for conditions.
    is_bytes = condition.dtype is torch.uint8
    return torch.where(condition.bool() if is_bytes else condition, x, other)


def _add_relu(x: torch.Tensor, other: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.add(x, other, alpha=alpha)


def _aminmax(
    x: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.aminmax(x, dim=dim, keepdim=keepdim)


def _column_major(a: torch.Tensor) -> torch.Tensor:
    """A matrix of the same shape and dtype, as LAPACK writes it."""
    return torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT


def _geqrf(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _column_major(a), a.new_empty(*a.shape[:-2], min(a.shape[-2:]))


def _linalg_eig(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Torch's own returns row-major ones, as on CUDA.
    values, vectors = torch.ops.aten.linalg_eig(a)
    return values, _column_major(vectors)


def _histogram(
    x: torch.Tensor, bins: int | torch.Tensor = 100, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    count = bins if isinstance(bins, int) else bins.numel() - 1
    return x.new_empty(count), x.new_empty(count + 1)


def _nonzero_static(x: torch.Tensor, *, size: int, fill_value: int = -1) -> torch.Tensor:
    # Torch's own returns the strides of its CUDA kernel.
    return x.new_empty((size, x.ndim), dtype=torch.long)


def _baddbmm(
    x: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    dtype: torch.dtype,
    *,
    beta: Any = 1,
    alpha: Any = 1,
) -> torch.Tensor:
    # Torch's own takes the dtype for beta.
    return torch.baddbmm(x.to(batch1.dtype), batch1, batch2).to(dtype)


def _grouped_mm(
    x: torch.Tensor,
    y: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    # Torch's own takes bfloat16 only; its kernels take these.
    check = torch._check
    check(
        x.dtype in (torch.float32, torch.bfloat16, torch.float16),
        lambda: f"Expected mat_a to be Float32, BFloat16 or Float16 matrix, got {x.dtype}",
    )
    check(x.ndim in (2, 3), lambda: "mat_a has to be 2 or 3d")
    check(y.ndim in (2, 3), lambda: "mat_b has to be 2 or 3d")
    check(
        x.dtype == y.dtype,
        lambda: f"expected m1 and m2 to have the same dtype, but got: {x.dtype} != {y.dtype}",
    )
    flat = x.ndim == 2 and y.ndim == 2
    check(
        x.shape[-1] == y.shape[-2],
        lambda: "contraction dimension of mat_a and mat_b must match",
    )
    check(
        (offs is None) == (x.ndim == y.ndim == 3),
        lambda: (
            "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
        ),
    )
    check(bias is None, lambda: "Bias not supported yet")
    check(
        out_dtype in (None, x.dtype),
        lambda: "Grouped gemm output dtype must match `mat_a` dtype",
    )
    rows, columns = x.shape[-2], y.shape[-1]
    groups = next((t.shape[0] for t in (x, y) if t.ndim == 3), None)
    if offs is None:
        check(x.shape[0] == y.shape[0], lambda: "batched dimension has to match")
        return x.new_empty(x.shape[0], rows, columns)
    check(offs.ndim == 1, lambda: "offs has to be 1D")
    check(offs.dtype == torch.int32, lambda: "Offsets have to be int32")
    check(flat or offs.shape[0] == groups, lambda: "matrix batch sizes have to match")
    return x.new_empty(offs.shape[0], rows, columns) if flat else x.new_empty(rows, columns)


def _of_channels(x: torch.Tensor) -> torch.Tensor:
    """A statistic of each channel (dimension 1), in the dtype that kernels compute in."""
    narrow = x.dtype in (torch.float16, torch.bfloat16)
    return x.new_empty(x.shape[1], dtype=torch.float32 if narrow else x.dtype)


def _batch_norm_stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return _of_channels(x), _of_channels(x)


def _batch_norm_backward_reduce(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    wants_input: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[torch.Tensor | None, ...]:
    likes = mean, mean, weight, weight
    wanted = wants_input, wants_input, wants_weight, wants_bias
    return tuple(
        (mean if like is None else like).new_empty(x.shape[1]) if wants else None
        for like, wants in zip(likes, wanted, strict=True)
    )


def _end_number(name: str, which: str, value: Any) -> Any:
    """A number of the kind that a 0-dim tensor holds; numbers stay as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    torch._check(
        value.dim() == 0,
        lambda: (
            f"{name} only supports 0-dimensional start and end tensors, but got {which} with "
            f"{value.dim()} dimension(s)."
        ),
    )
    return 1j if value.is_complex() else 1.0


def _spaced(name: str) -> Callable[..., torch.Tensor]:
    """For linspace and logspace between tensors, where torch's own treats complex as real."""

    def result(start: Any, end: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        ends = _end_number(name, "start", start), _end_number(name, "end", end)
        filled: torch.Tensor = getattr(torch, name)(*ends, *args, **kwargs)
        return filled

    return result


_SPACED = {
    f"{name}.{overload}": _spaced(name)
    for name in ("linspace", "logspace")
    for overload in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
}

# fmt: off
_FUSED = {
    "sgd": 3, "sgd.tensor_lr": 3, "adagrad": 4, "adagrad.tensor_lr": 3, "adam.tensor_lr": 5,
    "adamw.tensor_lr": 5,
}
"""Optimizers' operators without a meta kernel, and how many lists of tensors each returns."""
_LIKE_FIRST = ["_masked_softmax", "batch_norm_elemt", "glu_jvp"]
_SHAPED_AS_FIRST = [
    "_dirichlet_grad", "_logcumsumexp", "_masked_softmax_backward", "_sample_dirichlet",
    "_standard_gamma_grad", "binomial", "glu_backward_jvp",
]
_LIKE_SECOND = ["batch_norm_backward_elemt"]
_SHAPED_AS_SECOND = [
    "_ctc_loss_backward", "_ctc_loss_backward.Tensor", "fractional_max_pool3d_backward",
    "multi_margin_loss_backward", "multilabel_margin_loss_backward",
]
# fmt: on

_MISSING: dict[str, Callable[..., Any]] = {
    **{f"_fused_{name}": _copies(count) for name, count in _FUSED.items()},
    **{f"_fused_{name.replace('.', '_.')}": _writes_in_place for name in _FUSED if "." in name},
    **{f"_fused_{name}_": _writes_in_place for name in _FUSED if "." not in name},
    "batch_norm_stats": _batch_norm_stats,
    "batch_norm_backward_reduce": _batch_norm_backward_reduce,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_add_relu.Scalar": _add_relu,
    "_aminmax": _aminmax,
    "_aminmax.dim": _aminmax,
    "geqrf": _geqrf,
    "histogram.bin_ct": _histogram,
    "histogram.bins_tensor": _histogram,
    **dict.fromkeys(_LIKE_FIRST, _like(0)),
    **dict.fromkeys(_SHAPED_AS_FIRST, _like(0, memory_format=torch.contiguous_format)),
    **dict.fromkeys(_LIKE_SECOND, _like(1)),
    **dict.fromkeys(_SHAPED_AS_SECOND, _like(1, memory_format=torch.contiguous_format)),
    **QUANTIZATION,
}


def _takes_number(name: str) -> Callable[..., Any]:
    """For operators whose last argument may be a number on the CPU, which torch's own refuse."""
    op = find_op(f"aten::{name}")
    return lambda *args: op(*args[:-1], args[-1].to("meta"))


def _clamp(x: torch.Tensor, *bounds: Any) -> torch.Tensor:
    # To the CPU's kernel, floats remain floats with bounds of complex type, which have to be real.
    real = x.is_floating_point()
    given = (y.real if real and isinstance(y, complex) else y for y in bounds)
    return torch.clamp(x, *given)


_NUMBERED = ["copysign_.Tensor", "index_fill.int_Tensor", "index_fill_.int_Tensor"]
_NUMBERED += ["masked_fill.Tensor", "masked_fill_.Tensor"]
_CORRECTED: dict[str, Callable[..., Any]] = {
    "clamp": _clamp,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "linalg_eig": _linalg_eig,
    "linear_backward": _linear_backward,
    "multilabel_margin_loss_forward": _multilabel_margin_loss,
    "baddbmm.dtype": _baddbmm,
    "_grouped_mm": _grouped_mm,
    "nansum": _nansum,
    "where.self": _where,
    "nonzero_static": _nonzero_static,
    **{name: _takes_number(name) for name in _NUMBERED},
    **_SPACED,
    **ATTENTION,
    **STRIDES,
}


def install() -> None:
    """Registers the meta functions. Once per process."""
    for name in (*filter(_torch_lacks, _MISSING), *_CORRECTED):
        if (op := find_op(f"aten::{name}")) is not None:
            _own.define(str(op._schema).removeprefix("aten::"))
            _own.impl(name, {**_MISSING, **_CORRECTED}[name], "CompositeExplicitAutograd")
            theirs = op_implementations_dict.get(op)
            op_implementations_dict[op] = functools.partial(_of_fakes, theirs)


def _torch_lacks(name: str) -> bool:
    return not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta")


def _typed(op: Any, args: tuple[Any, ...]) -> Iterable[tuple[Any, str]]:
    """Arguments and their types in the schema."""
    return ((x, kind) for x, (_, kind, _) in zip(args, schema_of(op), strict=False))


def _of_fakes(
    theirs: Callable[..., Any] | None, mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any
) -> Any:
    """The results of `op` for fake tensors: ours on the device, by torch's own rule elsewhere.

    That rule, where there is one, is asked on the device, too, since it checks the arguments.
    """
    made = theirs(mode, op, *args, **kwargs) if theirs else NotImplemented
    given = tree_leaves((args, kwargs))
    device: Any = kwargs.get("device")
    places = [x.fake_device for x in given if isinstance(x, FakeTensor)]
    if all(place.type != BACKEND for place in (places if device is None else [device])):
        return made
    if any(kind == "Tensor" and not isinstance(x, torch.Tensor) for x, kind in _typed(op, args)):
        return made  # torch's decompositions pass numbers, which ours do not take
    if device is not None:
        kwargs["device"] = torch.device("meta")
    with in_kernel_invocation_manager(mode):
        made = on_meta(op)(*args, **kwargs)
    return mode.wrap_meta_outputs_with_default_device_logic(made, op, given, device=device)
