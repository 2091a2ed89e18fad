"""Layouts and compilers that do not exist for the device say so, and name what there is instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import DEVICE, assert_same, counted


def table(d: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4).to(d)


def row(d: str) -> torch.Tensor:
    return torch.arange(4.0).to(d)


COORDINATES = [[0, 1], [1, 2]]
LAYOUTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "to_sparse": ("sparse", lambda d: table(d).to_sparse()),
    "to_sparse_csr": ("sparse", lambda d: table(d).to_sparse_csr()),
    "to_sparse_bsr": ("sparse", lambda d: table(d).to_sparse_bsr((1, 1))),
    "sparse_coo_tensor": (
        "sparse",
        lambda d: torch.sparse_coo_tensor(COORDINATES, [1.0, 2.0], (3, 4), device=d),
    ),
    "empty sparse_coo_tensor": ("sparse", lambda d: torch.sparse_coo_tensor((3, 4), device=d)),
    "sparse_csr_tensor": (
        "sparse",
        lambda d: torch.sparse_csr_tensor([0, 1, 1, 1], [1], [1.0], (3, 4), device=d),
    ),
    "sparse, moved": ("sparse", lambda d: torch.eye(3).to_sparse().to(d)),
    "CSR, moved": ("sparse", lambda d: torch.eye(3).to_sparse_csr().to(d)),
    "sparse.mm": ("sparse", lambda d: torch.sparse.mm(torch.eye(3).to_sparse(), table(d))),
    "CSR @": ("sparse", lambda d: torch.eye(3).to_sparse_csr() @ table(d)),
    "empty": ("sparse", lambda d: torch.empty(2, 2, layout=torch.sparse_coo, device=d)),
    "zeros": ("sparse", lambda d: torch.zeros(2, 2, layout=torch.sparse_csr, device=d)),
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


@pytest.mark.parametrize("module", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_sparse_embeddings_train(module: Any) -> None:
    """Their gradients are dense on the device; what an optimizer makes of them is the same."""

    def trained(d: str) -> torch.Tensor:
        torch.manual_seed(0)
        embedding = module(5, 3, sparse=True).to(d)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            embedding(torch.tensor([[0, 3], [3, 1]]).to(d)).square().sum().backward()
            optimizer.step()
        return embedding.weight.detach()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = trained(DEVICE)
    assert_same(ours, trained("cpu"))
    assert sum("gradients of embeddings are dense" in str(w.message) for w in caught) <= 1


@pytest.mark.parametrize("name", ["matmul", "sum"])
def test_inductor_names_the_backend(name: str, fresh_dynamo: None) -> None:
    function = {"matmul": lambda x: x.mT @ x, "sum": lambda x: x.sum()}[name]
    compiled, x = torch.compile(function), torch.ones(2, 3, device=DEVICE)
    with pytest.raises(Exception, match=r'use torch\.compile\(\.\.\., backend="lazyxla"\)'):
        compiled(x)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(compiled(x).cpu(), function(x.cpu()))
