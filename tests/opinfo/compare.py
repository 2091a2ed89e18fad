"""Copies of samples on the device, and comparison of results with the CPU's."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from tests.opinfo.outcome import Mismatch

DEVICE = "lazyxla"


# Entries whose other tensors than the first PyTorch wants on the CPU, on every device.
HOST_ARGUMENTS = ("tensor_split",)


def copied(op: OpInfo, sample: SampleInput, device: str, precise: bool = False) -> SampleInput:
    """The sample on a device. Sizes, strides, offset and requires_grad of its tensors stay, and
    those of one dtype that share memory share it there.

    `precise`: in the next higher precision.
    """
    others = "cpu" if op.name in HOST_ARGUMENTS else device
    moved: _Moved = {}

    def copy(tree: Any, device: str) -> Any:
        return tree_map(lambda x: _copy(x, device, precise, moved), tree)

    return SampleInput(
        copy(sample.input, device),
        args=copy(sample.args, others),
        kwargs=copy(sample.kwargs, others),
        output_process_fn_grad=sample.output_process_fn_grad,
        broadcasts_input=sample.broadcasts_input,
    )


_HIGHER_PRECISION = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


# Storages as tensors on a device, by their address on the host, their dtype and the device.
_Moved = dict[tuple[int, torch.dtype, str], torch.Tensor]


def _copy(x: Any, device: str, precise: bool, moved: _Moved) -> Any:
    if isinstance(x, torch.device):
        return torch.device(device)
    if isinstance(x, str) and x == "cpu":
        return device
    if not isinstance(x, torch.Tensor):
        return x
    if x.layout is not torch.strided:
        return x.detach().to(device).requires_grad_(x.requires_grad)
    if x.is_conj():
        return (
            _copy(x.detach().conj(), device, precise, moved).conj().requires_grad_(x.requires_grad)
        )
    if x.is_neg():
        plain = _copy(x.detach()._neg_view(), device, precise, moved)
        return plain._neg_view().requires_grad_(x.requires_grad)
    # Through the storage, since a tensor that overlaps itself cannot be written to.
    key = (x.untyped_storage().data_ptr(), x.dtype, device)
    if key not in moved or x.numel() == 0:
        size = x.untyped_storage().nbytes() // x.element_size()
        storage = x.detach().as_strided((size,), (1,), 0)
        dtype = _HIGHER_PRECISION.get(x.dtype, x.dtype) if precise else x.dtype
        moved[key] = storage.to(device, dtype, copy=True)
    view = moved[key].as_strided(x.size(), x.stride(), x.storage_offset()).detach()
    return view.requires_grad_(x.requires_grad)


def compare(
    actual: Any, expected: Any, *, values: bool, strides: bool, tolerances: dict[str, float]
) -> None:
    """Compares two trees of results, the device's with the CPU's. Raises Mismatch."""
    ours, our_spec = tree_flatten(actual)
    theirs, their_spec = tree_flatten(expected)
    if len(ours) != len(theirs):
        raise Mismatch("structure", f"{our_spec} instead of {their_spec}")
    for i, (x, y) in enumerate(zip(ours, theirs)):
        place = f"output {i}: " if len(ours) > 1 else ""
        if not isinstance(y, torch.Tensor):
            if isinstance(y, torch.device) or (x == "lazyxla" and y == "cpu"):
                continue
            _compare_values(x, y, place, values, tolerances)
            continue
        if not isinstance(x, torch.Tensor):
            raise Mismatch("structure", f"{place}{type(x).__name__} instead of a tensor")
        _compare_metadata(x, y, place, strides)
        if values and y.layout is torch.strided:
            _compare_values(x.detach().cpu(), y.detach(), place, values, tolerances)


def _compare_metadata(x: torch.Tensor, y: torch.Tensor, place: str, strides: bool) -> None:
    if x.device.type != DEVICE:
        raise Mismatch("device", f"{place}on {x.device}")
    if x.dtype != y.dtype:
        raise Mismatch("dtype", f"{place}{x.dtype} instead of {y.dtype}")
    if x.shape != y.shape:
        raise Mismatch("shape", f"{place}{tuple(x.shape)} instead of {tuple(y.shape)}")
    if not strides or y.layout is not torch.strided or y.numel() == 0:
        return
    # The strides of size-1 dimensions address nothing.
    ours = [s for s, n in zip(x.stride(), x.shape) if n != 1]
    theirs = [s for s, n in zip(y.stride(), y.shape) if n != 1]
    if ours != theirs:
        raise Mismatch(
            "strides", f"{place}{x.stride()} instead of {y.stride()} for {tuple(y.shape)}"
        )


def _compare_values(x: Any, y: Any, place: str, values: bool, tolerances: dict[str, float]) -> None:
    if not values:
        return
    # Overrides are for the dtype of the sample; results of another dtype have the defaults.
    if isinstance(y, torch.Tensor) and not (y.is_floating_point() or y.is_complex()):
        tolerances = {}
    try:
        torch.testing.assert_close(x, y, equal_nan=True, check_stride=False, **tolerances)
    except AssertionError as error:
        raise Mismatch("values", place + str(error)) from None


def as_exact(actual: Any, expected: Any, reference: Any, tolerances: dict[str, float]) -> bool:
    """Whether the device is as near to a result in double precision as the CPU is.

    Where terms cancel, neither is within the default tolerances of the exact result, nor of the
    other. The device may then have twice the greatest error that the CPU has in an output.
    """
    triples = zip(tree_leaves(actual), tree_leaves(expected), tree_leaves(reference))
    for ours, theirs, exact in triples:
        if not isinstance(theirs, torch.Tensor):
            continue
        if theirs.dtype not in _HIGHER_PRECISION or ours.shape != exact.shape:
            return False
        ours, exact = ours.detach().cpu().to(exact.dtype), exact.detach()
        rtol, atol = torch.testing._comparison.default_tolerances(theirs.dtype)
        rtol, atol = tolerances.get("rtol", rtol), tolerances.get("atol", atol)
        error = (theirs.detach().to(exact.dtype) - exact).abs()
        greatest = error[error.isfinite()].max() if error.isfinite().any() else 0.0
        near = (ours - exact).abs() <= atol + rtol * exact.abs() + 2 * greatest
        same = (ours == theirs.detach()) | (ours.isnan() & theirs.isnan())
        if not bool((near | same).all()):
            return False
    return True
