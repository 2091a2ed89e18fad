"""PyTorch's table of operators (OpInfo), its samples and its tolerances."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import noncontiguous_like
from torch.testing._internal.opinfo.core import DecorateInfo, OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tests.opinfo.compare import copied
from tests.tables import forget_test_functions

forget_test_functions()

# Classes of PyTorch's tests that compare results, as these here do. The others compare gradients
# with finite differences, or compilers.
_COMPARING = (None, "TestCommon", "TestConsistency")


@functools.cache
def entries() -> dict[str, OpInfo]:
    """All entries by name, variants as in "div.floor_rounding"."""
    result: dict[str, OpInfo] = {}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        assert name not in result
        result[name] = op
    return result


def supports(op: OpInfo, dtype: torch.dtype, part: str) -> bool:
    """Whether PyTorch's CPU has this part of an entry."""
    if dtype not in op.supported_dtypes("cpu"):
        return False
    if part == "backward":
        return bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    if part == "inplace":
        return op.get_inplace() is not None
    if part == "out":
        return bool(op.supports_out)
    if part == "errors":
        return op.error_inputs_func is not None and dtype is torch.float32
    if part == "layouts":
        return dtype.is_floating_point or dtype.is_complex
    return True


def samples(
    op: OpInfo, dtype: torch.dtype, limit: int | None, gradients: bool = False
) -> Iterator[SampleInput]:
    """The first samples of an entry on the CPU, only those with dense tensors.

    Each is a copy from when it was made, for entries may write to its tensors to make the next.
    """
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", dtype, requires_grad=gradients)
    return (copied(op, sample, "cpu") for sample in itertools.islice(filter(_dense, made), limit))


def layouts(sample: SampleInput) -> Iterator[SampleInput]:
    """The sample with floating-point tensors that lie in memory in other ways.

    First not contiguous, then, where there are some with four dimensions, these as channels_last.
    """

    def scattered(x: Any) -> Any:
        return noncontiguous_like(x) if _floating(x) and x.dim() > 0 else x

    def channels_last(x: Any) -> Any:
        if not _floating(x) or x.dim() != 4:
            return x
        return x.detach().contiguous(memory_format=torch.channels_last)

    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    if any(_floating(x) and x.dim() > 0 for x in leaves):
        yield sample.transform(scattered)
    if any(_floating(x) and x.dim() == 4 for x in leaves):
        yield sample.transform(channels_last)


def _floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())


def _dense(sample: SampleInput) -> bool:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return all(
        x.layout is torch.strided and not x.is_quantized
        for x in leaves
        if isinstance(x, torch.Tensor)
    )


def tolerances(op: OpInfo, dtype: torch.dtype) -> dict[str, float]:
    """rtol and atol that the entry declares beyond PyTorch's defaults, or nothing."""
    found: list[tuple[float, float]] = []
    for decorator in op.decorators:
        where = None
        if isinstance(decorator, DecorateInfo):
            where = decorator.cls_name
            if decorator.dtypes is not None and dtype not in decorator.dtypes:
                continue
            inner = decorator.decorators
        else:
            inner = [decorator]
        if where not in _COMPARING:
            continue
        found += [pair for d in inner if (pair := _override(d, dtype)) is not None]
    if not found:
        return {}
    rtol, atol = _defaults(dtype)
    return {"rtol": max(rtol, *(r for r, _ in found)), "atol": max(atol, *(a for _, a in found))}


def _override(decorator: Any, dtype: torch.dtype) -> tuple[float, float] | None:
    """(rtol, atol) of a decorator for a dtype, or None."""
    if isinstance(decorator, toleranceOverride) and dtype in decorator.d:
        return decorator.d[dtype].rtol, decorator.d[dtype].atol
    if isinstance(decorator, precisionOverride) and dtype in decorator.d:
        return 0.0, decorator.d[dtype]
    return None


def _defaults(dtype: torch.dtype) -> tuple[float, float]:
    return torch.testing._comparison.default_tolerances(dtype)
