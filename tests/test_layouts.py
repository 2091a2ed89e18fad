"""Layouts and compilers that do not exist for the device say so, and name what there is instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import DEVICE, counted


def table(d: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(d)


def row(d: str) -> torch.Tensor:
    return torch.arange(4.0).to(d)


LAYOUTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "quantize": ("quantized", lambda d: torch.quantize_per_tensor(table(d), 0.1, 0, torch.qint8)),
    "quantized, moved": (
        "quantized",
        lambda d: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to(d),
    ),
    "empty, quantized": ("quantized", lambda d: torch.empty(2, dtype=torch.qint8, device=d)),
    "nested, moved": (
        "nested",
        lambda d: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(d),
    ),
    "as_nested_tensor": ("nested", lambda d: torch.nested.as_nested_tensor([row(d), row(d)])),
    "nested_tensor": (
        "nested",
        lambda d: torch.nested.nested_tensor([torch.ones(2)], device=d).unbind(),
    ),
    "nested_tensor with gradients": (
        "nested",
        lambda d: torch.nested.nested_tensor([row("cpu")], device=d, requires_grad=True) * 2,
    ),
    "transposed nested_tensor with gradients": (
        "nested",
        lambda d: torch.nested.nested_tensor(
            [table("cpu")], device=d, requires_grad=True
        ).transpose(-1, -2),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore")
def test_layouts_that_do_not_exist_say_so(name: str) -> None:
    what, call = LAYOUTS[name]
    pattern = rf"^lazyxla: {what}[^:]* not exist on this device: [^\n]*$"
    with pytest.raises(NotImplementedError, match=pattern):
        call(DEVICE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the CPU's are
def test_encoders_keep_padded_tensors_padded() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, is_padding = torch.randn(2, 5, 16), torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 1, 1]]).bool()
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=is_padding)
        encoder.to(DEVICE)
        with counted() as n:
            found = encoder(x.to(DEVICE), src_key_padding_mask=is_padding.to(DEVICE))
    assert n.flushes == n.fallbacks == 0
    torch.testing.assert_close(found.cpu()[~is_padding], expected[~is_padding])


@pytest.mark.parametrize("name", ["matmul", "sum"])
def test_inductor_names_the_backend(name: str, fresh_dynamo: None) -> None:
    function = {"matmul": lambda x: x.mT @ x, "sum": lambda x: x.sum()}[name]
    compiled, x = torch.compile(function), torch.ones(2, 3, device=DEVICE)
    with pytest.raises(Exception, match=r'use torch\.compile\(\.\.\., backend="lazyxla"\)'):
        compiled(x)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled(x).cpu(), function(x.cpu()))
