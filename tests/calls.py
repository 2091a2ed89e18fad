"""Calls of operators that no sample of PyTorch's operator table comes down to on the CPU.

Most are what a device's kernels are called by: what the CPU decomposes, fuses otherwise or writes
in place. Their arguments fit each other, which arguments made up from a schema would not.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.testing import make_tensor
from torch.utils._pytree import tree_map_only

from lazyxla.lowering import Program
from lazyxla.lowering.fx_graph import program_of_call
from lazyxla.lowering.operators import find_op, on_meta
from tests.support import on_device

_Args = tuple[Any, ...]


class Call(NamedTuple):
    """Arguments on the CPU."""

    args: _Args
    kwargs: dict[str, Any]

    def run(self, name: str, device: str) -> Any:
        """The operator's result on a device; what it writes to are copies."""
        args, kwargs = on_device((self.args, self.kwargs), device)
        return find_op(name)(*args, **kwargs)

    def to(self, dtype: torch.dtype) -> Call:
        """The same with tensors of another dtype in the place of float32, except for numbers."""

        def convert(x: Tensor) -> Tensor:
            return x.to(dtype) if x.dtype == torch.float32 and x.dim() else x

        return Call(*tree_map_only(Tensor, convert, tuple(self)))

    def program(self, name: str) -> Program:
        """As it is lowered: the results' types are those of the meta function."""
        args, kwargs = on_device((self.args, self.kwargs), "meta")
        op = find_op(name)
        return program_of_call(op, args, kwargs, on_meta(op)(*args, **kwargs))


@functools.cache
def calls() -> dict[str, Call]:
    """Operators to calls, in float32 where they take it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = {
            **_of_bits(),
            **_of_matrices(),
            **_of_batch_norm(),
            **_of_bags(),
            **_of_optimizers(),
            **_of_attention(),
            **_of_losses(),
            **_of_cells(),
        }
    return {
        name if "::" in name else f"aten::{name}": _call(arguments)
        for name, arguments in found.items()
    }


def _call(arguments: _Args) -> Call:
    """The last argument may be a dictionary: those by name."""
    if isinstance(arguments[-1], dict):
        return Call(arguments[:-1], arguments[-1])
    return Call(arguments, {})


def _random(*shape: int, low: float = -2, dtype: torch.dtype = torch.float32) -> Tensor:
    return make_tensor(shape, dtype=dtype, device="cpu", low=low, high=3)


def _integers(*shape: int, high: int = 9) -> Tensor:
    return make_tensor(shape, dtype=torch.int64, device="cpu", low=0, high=high)


def _of_bits() -> dict[str, _Args]:
    x, count = _integers(3, 4), _integers(4, high=5)
    truths = (_integers(3, 4, high=2).bool(),)
    found: dict[str, _Args] = {"_is_all_true": truths, "_is_any_true": truths}
    for name in ("__lshift__", "__rshift__"):
        found |= {f"{name}.Tensor": (x, count), f"{name}.Scalar": (x, 2)}
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        found |= {f"{name}.Scalar": (x, 6), f"{name}.Scalar_Tensor": (6, x)}
    return found


def _of_matrices() -> dict[str, _Args]:
    x, norms = _random(3, 4), _random(3, 1, low=0.5)
    index, reduce = _integers(3, 4, high=3), {"reduce": "multiply"}
    batch, other = _random(2, 3, 4, dtype=torch.bfloat16), _random(2, 4, 5, dtype=torch.bfloat16)
    int8 = [make_tensor(17, 32, dtype=torch.int8, device="cpu") for _ in range(2)]
    float8 = [_random(16, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = torch.tensor(2.0), torch.tensor(0.3)
    recipes = [scales[0]], [0], [0], [scales[1]], [0], [0]
    window = {"kernel_size": [2, 3], "dilation": [2, 1], "padding": [1, 0], "stride": [1, 2]}
    return {
        "_add_relu.Scalar": (x, 0.5, 2),
        "_aminmax": (x,),
        "_aminmax.dim": (x, 1, True),
        "_int_mm": (int8[0], int8[1].t()),
        "_logcumsumexp": (x, 1),
        "_scaled_mm": (float8[0], float8[1].t(), *scales, {"out_dtype": torch.bfloat16}),
        "_scaled_mm_v2": (float8[0], float8[1].t(), *recipes, None, torch.bfloat16),
        "_upsample_bicubic2d_aa_backward": (_random(1, 2, 3, 5), [3, 5], [1, 2, 8, 6], False),
        "_weight_norm_interface": (x, norms),
        "_weight_norm_interface_backward": (_random(3, 4), x, norms, _random(3, 1, low=0.5), 0),
        "baddbmm.dtype": (_random(2, 3, 5), batch, other, torch.float32, {"alpha": 0.5}),
        "bucketize.Scalar": (0.5, _random(6).sort().values, {"right": True}),
        "col2im": (_random(2, 12, 18), [6, 7], window),
        "linear_backward": (_random(2, 3, 4), _random(2, 3, 5), _random(5, 4), [True] * 3),
        "scatter.reduce": (x, 0, index, _random(3, 4), reduce),
        "scatter.value_reduce": (x, 0, index, 1.5, reduce),
    }


def _of_batch_norm() -> dict[str, _Args]:
    x, affine = _random(2, 3, 4), (_random(3), _random(3))
    running, momentum, eps = (_random(3), _random(3, low=0.5)), 0.1, 1e-5
    saved = (_random(3), _random(3, low=0.5))
    reserve = torch.empty(0, dtype=torch.uint8)
    given = (_random(2, 3, 4), x, affine[0], *running, *saved)
    evaluated = (x, *affine, *running, momentum, eps)
    return {
        "_batch_norm_no_update": evaluated,
        "_batch_norm_with_update_functional": evaluated,
        "_native_batch_norm_legit_functional": (x, *affine, *running, True, momentum, eps),
        "_native_batch_norm_legit_no_training": evaluated,
        "batch_norm_backward": (*given, True, eps, [True] * 3, reserve),
    }


def _of_bags() -> dict[str, _Args]:
    """Bags of 2, 0 and 4 rows, and their means."""
    weight, indices, offsets = _random(5, 3), _integers(6, high=5), torch.tensor([0, 2, 2])
    bags, sizes = torch.tensor([0, 0, 2, 2, 2, 2]), torch.tensor([2, 0, 4])
    backward = (_random(3, 3), indices, bags, sizes, torch.empty(0, dtype=torch.int64))
    return {
        "_embedding_bag_forward_only": (weight, indices, offsets, False, 1),
        "_embedding_bag_dense_backward": (*backward, 5, False, 1, None),
    }


def _of_optimizers() -> dict[str, _Args]:
    def tensors(low: float = -2) -> list[Tensor]:
        return [_random(3, 4, low=low), _random(5, low=low)]

    rate, rates = {"lr": 0.01}, {"lr": torch.tensor(0.01)}
    shared = {"weight_decay": 0.1, "maximize": False}
    adam = {**shared, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": True}
    adagrad = {**shared, "lr_decay": 0.001, "eps": 1e-10}
    sgd = {**shared, "momentum": 0.9, "dampening": 0.3, "nesterov": False, "is_first_step": False}
    params, steps = (tensors(), tensors()), [torch.tensor(3.0), torch.tensor(3.0)]
    moments, sums = (tensors(), tensors(0), tensors(0), steps), (tensors(0), steps)
    return {
        "_fused_adagrad": (*params, *sums, adagrad | rate),
        "_fused_adagrad.tensor_lr": (*params, *sums, adagrad | rates),
        "_fused_adam": (*params, *moments, adam | rate),
        "_fused_adam.tensor_lr": (*params, *moments, adam | rates),
        "_fused_adamw": (*params, *moments, adam | rate),
        "_fused_adamw.tensor_lr": (*params, *moments, adam | rates),
        "_fused_sgd.tensor_lr": (*params, tensors(), sgd | rates),
    }


def _of_attention() -> dict[str, _Args]:
    """2 samples of 4 steps, 2 heads."""
    width, wide = 6, 12
    x, size = _random(2, 4, width), (width, 2)

    def linear(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
        return _random(outputs, inputs) / inputs, _random(outputs)

    attend = (*linear(3 * width, width), *linear(width, width))
    norms = [_random(width) for _ in range(4)]
    feed = (*linear(wide, width), *linear(width, wide))
    query, sums, stream = _random(2, 2, 4, 3), _random(2, 2, 4), _integers(2)
    dropout = (None, 0.25, True, None)
    return {
        "lazyxla::dropout_attention": (query, query, query, *dropout),
        "lazyxla::dropout_attention_backward": (
            *(query, query, query, query, None, query, sums, stream),
            *dropout[1:],
        ),
        "_native_multi_head_attention": (x, x, x, *size, *attend),
        "_transformer_encoder_layer_fwd": (x, *size, *attend, True, False, 1e-5, *norms, *feed),
    }


def _of_losses() -> dict[str, _Args]:
    """5 samples of 4 classes."""
    logits, classes, weight = _random(5, 4), _integers(5, high=4), _random(4, low=0.5)
    of_samples = logits.amax(1), _random(5, low=0.5)
    given = (logits, classes, weight, 1, -100)
    return {
        "lazyxla::cross_entropy": given,
        "lazyxla::cross_entropy_backward": (_random(), *given, *of_samples, weight.sum()),
    }


def _of_cells() -> dict[str, _Args]:
    """3 samples, a state of 4."""
    state = _random(3, 4)

    def gates(count: int) -> tuple[Tensor, ...]:
        size = 4 * count
        return _random(3, size), _random(3, size), state, _random(size), _random(size)

    return {
        "_thnn_fused_gru_cell": gates(3),
        "_thnn_fused_gru_cell_backward": (state, _random(3, 20, low=0), True),
        "_thnn_fused_lstm_cell": gates(4),
    }
