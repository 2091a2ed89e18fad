"""Meta functions whose strides, and in one case shape, are those of the CPU's kernels, where those
of torch's own differ.

Each calls torch's own first, which checks the arguments and knows shape and dtype.
``lazyxla/meta_functions.py`` registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.utils._pytree import tree_map_only

from lazyxla.lowering.operators import find_op


def _map(change: Callable[[torch.Tensor], torch.Tensor], results: Any) -> Any:
    return tree_map_only(torch.Tensor, change, results)


def _iterated(name: str) -> Callable[..., torch.Tensor]:
    """For pointwise operators, of which torch's own is made of others, or imitates in Python how
    kernels order dimensions.

    A comparison of the same tensors asks what kernels ask.
    """

    def result(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = find_op(f"aten::{name}")(*args, **kwargs)
        tensors = [x for x in args if isinstance(x, torch.Tensor)][:2]  # others are numbers
        return torch.empty_like(torch.eq(tensors[0], tensors[-1]), dtype=made.dtype)

    return result


def _contiguous(name: str) -> Callable[..., Any]:
    """For operators whose CPU kernel returns contiguous tensors whatever its arguments."""

    def result(*args: Any, **kwargs: Any) -> Any:
        return _map(torch.Tensor.contiguous, find_op(f"aten::{name}")(*args, **kwargs))

    return result


def _keeps_strides(name: str, position: int = 0) -> Callable[..., torch.Tensor]:
    """For losses whose CPU kernel gives those of elements the strides of an argument."""

    def result(*args: Any, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = find_op(f"aten::{name}")(*args, **kwargs)
        like: torch.Tensor = args[position]
        return torch.empty_like(like) if made.shape == like.shape else made

    return result


def _angle(x: torch.Tensor) -> torch.Tensor:
    # Torch's own keeps the strides of complex numbers.
    made: torch.Tensor = torch.ops.aten.angle(x)
    return made.contiguous() if x.is_complex() else made


def _roll(x: torch.Tensor, shifts: list[int], dims: list[int] | None = None) -> torch.Tensor:
    memory_format = suggest_memory_format(x) if dims else torch.contiguous_format
    made: torch.Tensor = torch.ops.aten.roll(x, shifts, dims or [])
    return torch.empty_like(made, memory_format=memory_format)


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> Any:
    # Torch's own keeps norms of float16 in float16; kernels keep those of all 16-bit types wide.
    made, norms = torch.ops.aten._weight_norm_interface(v, g, dim)
    wide = torch.float32 if g.dtype == torch.float16 else norms.dtype
    return made.contiguous(), torch.empty_like(norms.contiguous(), dtype=wide)


def _copysign(x: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    # Torch's own refuses numbers on the CPU.
    made = torch.ops.aten.copysign(x.to("meta"), sign.to("meta"))
    return torch.empty_like(torch.eq(x, sign), dtype=made.dtype)


def _ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    # Kernels make a contiguous power of two first, unless the exponent alone is integral.
    made = torch.ops.aten.ldexp(x, exponent)
    if x.is_floating_point() and not exponent.is_floating_point():
        return torch.empty_like(torch.eq(x, exponent), dtype=made.dtype)
    return torch.empty_like(torch.eq(x, exponent.contiguous()), dtype=made.dtype)


def _transformed(
    x: torch.Tensor, dims: list[int], sizes: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """In the order of MKL: the other dimensions by their strides, then the transformed."""
    if not torch.backends.mkl.is_available():
        return x.new_empty(sizes, dtype=dtype)
    others = sorted(set(range(x.ndim)) - set(dims), key=x.stride, reverse=True)
    order = [*others, *dims]
    made = x.new_empty([sizes[d] for d in order], dtype=dtype)
    return made.permute([order.index(d) for d in range(x.ndim)])


def _by_stride(x: torch.Tensor, dims: list[int]) -> list[int]:
    return sorted(dims, key=x.stride, reverse=True)


def _fft_r2c(x: torch.Tensor, dim: list[int], normalization: int, onesided: bool) -> torch.Tensor:
    # Torch's own returns the strides of its CUDA kernel, as do the next two.
    made = torch.ops.aten._fft_r2c(x, dim, normalization, onesided)
    dims = [*_by_stride(x, dim[:-1]), dim[-1]]
    return _transformed(x, dims, made.shape, made.dtype)


def _fft_c2c(x: torch.Tensor, dim: list[int], normalization: int, forward: bool) -> torch.Tensor:
    made = torch.ops.aten._fft_c2c(x, dim, normalization, forward)
    return _transformed(x, _by_stride(x, dim), made.shape, made.dtype) if dim else made


def _fft_c2r(x: torch.Tensor, dim: list[int], normalization: int, size: int) -> torch.Tensor:
    made = torch.ops.aten._fft_c2r(x, dim, normalization, size)
    if len(dim) > 1:
        x = _fft_c2c(x, dim[:-1], normalization, False)
    return _transformed(x, dim[-1:], made.shape, made.dtype)


def _keeps_format(name: str, position: int = 0) -> Callable[..., Any]:
    """For operators whose CPU kernel gives its results an argument's memory format.

    Torch's own lose it, or give them the argument's strides.
    """

    def result(*args: Any, **kwargs: Any) -> Any:
        like = args[position]
        memory_format = suggest_memory_format(like)

        def formatted(made: torch.Tensor) -> torch.Tensor:
            if made.ndim != like.ndim:  # a statistic
                return made
            return torch.empty_like(made, memory_format=memory_format)

        return _map(formatted, find_op(f"aten::{name}")(*args, **kwargs))

    return result


def _flat(made: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A result in one dimension, which kernels compute in two, once the first operand is
    contiguous.
    """
    memory_format = suggest_memory_format(weight.unsqueeze(2))
    return torch.empty_like(made.unsqueeze(2), memory_format=memory_format).squeeze(2)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *args: Any) -> torch.Tensor:
    # Torch leaves the memory format to the backend. The CPU's kernels follow both.
    made: torch.Tensor = torch.ops.aten.convolution(x, weight, *args)
    if x.ndim == 3:
        return _flat(made, weight)
    for memory_format in map(suggest_memory_format, (x, weight)):
        if memory_format != torch.contiguous_format:
            return torch.empty_like(made, memory_format=memory_format)
    return made


def _convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any
) -> Any:
    # Torch's own is right elsewhere, but its rule for fake tensors makes the results contiguous.
    made = torch.ops.aten.convolution_backward(grad, x, weight, *args)
    return _map(lambda t: _flat(t, weight) if t.ndim == 3 else t, made)


def _pool3d(name: str) -> Callable[..., Any]:
    """For poolings of volumes, of which torch's own lose the format of a single sample."""
    last = torch.channels_last_3d

    def result(*args: Any, **kwargs: Any) -> Any:
        made, x = find_op(f"aten::{name}")(*args, **kwargs), args[0]
        if x.ndim == 5 or x.is_contiguous() or not x[None].is_contiguous(memory_format=last):
            return made
        return _map(lambda t: torch.empty_like(t[None], memory_format=last)[0], made)

    return result


def _group_norm(x: torch.Tensor, weight: Any, bias: Any, n: int, c: int, *args: Any) -> Any:
    # Torch's own takes the first two dimensions for n and c, kernels count elements.
    positions = args[0]
    is_other = x.shape[:2] != (n, c) and n * c * positions == x.numel()
    shaped = x.reshape(n, c, positions) if is_other else x
    statistics = torch.ops.aten.native_group_norm(shaped, weight, bias, n, c, *args)[1:]
    return (torch.empty_like(x, memory_format=suggest_memory_format(x)), *statistics)


def _group_norm_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    of_x, *rest = torch.ops.aten.native_group_norm_backward(grad, x, *args)
    if of_x is not None:
        of_x = torch.empty_like(of_x, memory_format=suggest_memory_format(x))
    return (of_x, *rest)


def _pixel_unshuffle(x: torch.Tensor, factor: int) -> torch.Tensor:
    # The CPU's kernel returns an empty tensor as it is.
    made: torch.Tensor = torch.ops.aten.pixel_unshuffle(x, factor)
    return made if x.numel() else torch.empty_like(x)


def _batch_norm_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
    # Torch's own divides by the number of elements, and the CPU's kernel crashes if there are none.
    def with_elements(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.new_empty([max(size, 1) for size in value.shape])

    op = find_op("aten::native_batch_norm_backward")
    of_channels = op(*map(with_elements, (grad, x, *args)))[1:]
    grad_x = torch.empty_like(x, memory_format=suggest_memory_format(x))
    return (grad_x, *(t if t is None else t.new_empty(x.shape[1]) for t in of_channels))


# fmt: off
_ITERATED = [
    "complex", "div.Tensor_mode", "elu_backward", "floor_divide",
    "hardsigmoid_backward", "hardswish_backward", "hardtanh_backward", "heaviside", "logaddexp",
    "logaddexp2", "logical_and", "logical_or", "logical_xor", "logit_backward",
    "native_dropout_backward", "polar", "softplus_backward", "special_xlog1py", "xlogy.Tensor",
]
_CONTIGUOUS = [
    "_log_softmax_backward_data", "_standard_gamma", "glu_backward", "huber_loss_backward",
    "isin.Tensor_Scalar", "isin.Tensor_Tensor", "log_sigmoid_forward",
    "mse_loss_backward", "nll_loss2d_forward", "normal.Tensor_Tensor", "normal.float_Tensor",
    "poisson", "pow.Scalar", "rrelu_with_noise_functional", "smooth_l1_loss_backward",
]
_KEEPS_FORMAT = [
    "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "channel_shuffle", "max_unpool2d", "pixel_shuffle",
    "reflection_pad2d", "reflection_pad3d", "replication_pad2d", "replication_pad3d",
]
_KEEPS_FORMAT_OF_SECOND = [
    "reflection_pad2d_backward", "reflection_pad3d_backward", "replication_pad2d_backward",
    "replication_pad3d_backward",
]
_KEEPS_STRIDES = ["binary_cross_entropy", "huber_loss"]
# fmt: on

STRIDES: dict[str, Callable[..., Any]] = {
    "_fft_c2c": _fft_c2c,
    "_fft_c2r": _fft_c2r,
    "_fft_r2c": _fft_r2c,
    "_weight_norm_interface": _weight_norm,
    "angle": _angle,
    "convolution": _convolution,
    "copysign.Tensor": _copysign,
    "convolution_backward": _convolution_backward,
    "binary_cross_entropy_backward": _keeps_strides("binary_cross_entropy_backward", 1),
    "ldexp.Tensor": _ldexp,
    "max_pool3d_with_indices": _pool3d("max_pool3d_with_indices"),
    "max_pool3d_with_indices_backward": _pool3d("max_pool3d_with_indices_backward"),
    "native_batch_norm_backward": _batch_norm_backward,
    "native_group_norm": _group_norm,
    "native_group_norm_backward": _group_norm_backward,
    "pixel_unshuffle": _pixel_unshuffle,
    "roll": _roll,
    **{name: _iterated(name) for name in _ITERATED},
    **{name: _contiguous(name) for name in _CONTIGUOUS},
    **{name: _keeps_format(name) for name in _KEEPS_FORMAT},
    **{name: _keeps_format(name, 1) for name in _KEEPS_FORMAT_OF_SECOND},
    **{name: _keeps_strides(name) for name in _KEEPS_STRIDES},
}
