"""Operators on lists take and refuse what those on their elements do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import DEVICE, assert_same, counted, error_of, on_device

DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.complex64)
TENSORS, NUMBERS, NUMBER, TENSOR, MATRICES = [(2, 3), (4,)], [2, 3], 2, (), [(3, 3), (4, 4)]
KINDS = {"List[Tensor]": TENSORS, "List[number]": NUMBERS, "number": NUMBER, "Tensor": TENSOR}


def operators() -> Iterator[Any]:
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if packet.startswith("_foreach_") and not overload.endswith("out"):
            yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def arguments(op: Any, dtype: torch.dtype, device: str) -> list[Any]:
    """For all parameters without a default. The shapes of the lists' elements are the same."""

    def ones(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype).to(device)

    made: list[Any] = []
    for parameter in op._schema.arguments:
        kind = KINDS.get(str(parameter.type))
        if parameter.has_default_value() or kind is None:
            continue
        if parameter.name == "scalars" and kind is TENSOR:
            made.append(torch.ones(2, dtype=dtype))
        elif kind is TENSORS:
            shapes = MATRICES if "_mm" in op.name() else TENSORS
            made.append([ones(shape) for shape in shapes])
        else:
            made.append(ones(TENSOR) if kind is TENSOR else kind)
    return made


def outcome(op: Any, dtype: torch.dtype, device: str) -> Any:
    """The dtypes of the results, or the error."""

    def call() -> list[torch.dtype]:
        given = arguments(op, dtype, device)
        results = op(*given)
        return [x.dtype for x in (given[0] if results is None else results)]

    kind, text = error_of(call)
    return call() if kind is type(None) else (kind, text)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refused_or_accepted_as_on_the_cpu(dtype: torch.dtype) -> None:
    calls = list(operators())
    expected = {op.name(): outcome(op, dtype, "cpu") for op in calls}
    assert {op.name(): outcome(op, dtype, DEVICE) for op in calls} == expected
    assert len(calls) > 100


def test_large_tensors_are_accepted() -> None:
    """Small ones stand for them when the CPU's kernel is asked."""
    xs = [torch.randn(n, 40) for n in (100, 110, 120)]
    with counted() as n:
        actual = torch._foreach_mul(on_device(xs), 2.0)
    assert n.nodes_recorded == 1
    assert_same(list(actual), torch._foreach_mul(xs, 2.0))


@pytest.mark.parametrize(("source", "target"), [("cpu", DEVICE), (DEVICE, "cpu")])
def test_copies_between_devices(source: str, target: str) -> None:
    xs = [torch.randn(100, 100), torch.randn(3)]
    copies = [torch.zeros_like(x, device=target) for x in xs]
    versions = [x._version for x in copies]
    torch._foreach_copy_(copies, [x.to(source) for x in xs])
    assert all(x._version > before for x, before in zip(copies, versions, strict=True))
    for x, copy in zip(xs, copies, strict=True):
        assert copy.device.type == target
        assert torch.equal(copy.cpu(), x)


def test_copies_within_the_device_are_one_operator() -> None:
    xs = [torch.randn(2, 3), torch.randn(3)]
    ours = on_device(xs)
    copies = [torch.zeros_like(x) for x in ours]
    with counted() as n:
        torch._foreach_copy_(copies, ours)
    assert n.nodes_recorded == 1
    assert_same(copies, xs)


def test_copies_of_lists_of_different_lengths() -> None:
    x = torch.randn(3)
    expected = error_of(torch._foreach_copy_, [x], [x, x])
    assert error_of(torch._foreach_copy_, [x.to(DEVICE)], [x, x]) == expected
