"""What a process knows of shapes: torch's meta kernels, and what some calls yield for them.

    python -m tests.meta_calls [lazyxla]

Prints it as JSON, of a process that has imported the package or not; test_meta_functions.py
compares the two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
LAST = torch.channels_last


def _numbers(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 1, torch.Size(shape).numel()).reshape(shape)


def _gates(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.repeat(1, 4), x.repeat(1, 4), x]


def _backward(x: torch.Tensor, weight: torch.Tensor, transposed: bool) -> Any:
    options = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    grad = aten.convolution(x, weight, None, *options)
    return aten.convolution_backward(grad, x, weight, [4], *options, [True, True, True])


# Calls of which torch's own meta functions fail or tell another shape than CPU kernels.
CORRECTED: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
    "linear_backward": (_numbers(3, 3), lambda x: aten.linear_backward(x, x, x, [1, 1, 0])),
    "convolution": (
        _numbers(2, 4, 5, 3),
        lambda x: [F.conv2d(x.to(memory_format=LAST), x[:, :, :2, :2]), F.conv2d(x, x[..., :2])],
    ),
    "convolution, weight": (
        _numbers(2, 4, 5, 3),
        lambda x: F.conv_transpose2d(x, x.view(4, 2, 5, 3).to(memory_format=LAST), stride=2),
    ),
    "convolution, 3 dimensions": (
        _numbers(2, 4, 5, 3, 2),
        lambda x: F.conv3d(x.to(memory_format=torch.channels_last_3d), x),
    ),
    "convolution_backward": (
        _numbers(4, 4, 5, 3),
        lambda x: _backward(x.to(memory_format=LAST), x[..., :2, :2], False),
    ),
    "convolution_backward, weight": (
        _numbers(4, 4, 5, 3),
        lambda x: _backward(x, x.to(memory_format=LAST), True),
    ),
    "_native_multi_head_attention": (
        _numbers(2, 3, 4),
        lambda x: torch._native_multi_head_attention(
            *(x, x, x, 4, 2, x.reshape(6, 4).repeat(2, 1), x.flatten()[:12]),
            *(x.flatten()[:16].view(4, 4), x[0, 0]),
            need_weights=False,
        ),
    ),
    "copysign": (_numbers(2, 3), lambda x: x.mT.copysign(torch.tensor(-1.0, device="cpu"))),
    "index_fill": (
        _numbers(2, 3),
        lambda x: x.index_fill(0, torch.argmin(x, 1), torch.tensor(2, device="cpu")),
    ),
    "masked_fill": (
        _numbers(2, 3),
        lambda x: x.masked_fill(x[0] > 0.2, torch.tensor(2.0, device="cpu")),
    ),
    "linalg_eig": (_numbers(2, 3, 3), torch.linalg.eig),
    "nonzero_static": (_numbers(2, 3), lambda x: torch.nonzero_static(x, size=3)),
    "nansum": (_numbers(2, 3), lambda x: torch.nansum(x, [])),
    "linspace": (_numbers(), lambda x: torch.linspace(x * 1j, x, 3, device=x.device)),
    "_grouped_mm": (_numbers(2, 8, 8), lambda x: aten._grouped_mm(x, x)),
    "pixel_shuffle": (_numbers(1, 4, 2, 3), lambda x: F.pixel_shuffle(x.to(memory_format=LAST), 2)),
    "reflection_pad2d": (
        _numbers(1, 4, 2, 3),
        lambda x: aten.reflection_pad2d(x.to(memory_format=LAST), [1, 1, 1, 1]),
    ),
    "_thnn_fused_lstm_cell": (_numbers(2, 3), lambda x: aten._thnn_fused_lstm_cell(*_gates(x))),
}

# Calls of operators that have no meta kernel.
MISSING: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], Any]]] = {
    "geqrf": (_numbers(3, 2), torch.geqrf),
    "_logcumsumexp": (_numbers(3, 2), lambda x: aten._logcumsumexp(x, 0)),
    "histogram": (_numbers(3, 2), lambda x: aten.histogram.bin_ct(x, 4)),
    "glu_jvp": (_numbers(4), lambda x: aten.glu_jvp(x[:2], x, x, 0)),
}


def described(results: Any) -> list[str]:
    """Dtype, sizes and strides of tensors."""
    tensors = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
    return [f"{x.dtype} {list(x.shape)} {list(x.stride())}" for x in tensors]


def told(name: str, device: str) -> list[str]:
    """What a call yields for a meta or fake tensor, or the error."""
    x, call = (CORRECTED | MISSING)[name]
    try:
        return described(call(torch.empty(x.shape, device=device)))
    except Exception as error:  # whatever way torch has of refusing
        return [type(error).__name__, str(error).partition("\n")[0]]


def registrations() -> dict[str, list[str]]:
    """Where each of torch's operators has its meta kernel from."""
    dump, table = torch._C._dispatch_dump, torch._C._dispatch_dump_table
    return {
        name: [line for line in (dump(name) + table(name)).splitlines() if line.startswith("Meta")]
        for name in sorted(torch._C._dispatch_get_all_op_names())
        if name.startswith(("aten::", "prims::"))
    }


if __name__ == "__main__":
    if sys.argv[1:]:
        import lazyxla  # noqa: F401
    names = [*CORRECTED, *MISSING]
    found: dict[str, Any] = {
        "registrations": registrations(),
        "on meta tensors": {name: told(name, "meta") for name in names},
    }
    for device in ("cpu", "meta"):
        with FakeTensorMode():
            found[f"on fake tensors, {device}"] = {name: told(name, device) for name in names}
    print(json.dumps(found))
