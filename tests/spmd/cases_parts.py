"""What the partitioner cannot split is computed by each device, on the part that is its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import MESH

import lazyxla
from lazyxla.lowering import rule
from lazyxla.lowering.program import TensorSpec
from tests.support import DEVICE, counted


@torch.library.custom_op("lazyxla_parts::scores", mutates_args=(), device_types="cpu")
def scores(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x @ y.mT).softmax(-1)


@scores.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], y.shape[-2])


shapes: list[tuple[int, ...]] = []  # of the parts of x that are lowered


@rule("lazyxla_parts::scores")
def _lower(b: Any, x: Any, y: Any) -> Any:
    def compute(x: Any, y: Any) -> list[Any]:
        shapes.append(tuple(b.shape(x)))
        products = b.dot(x, y, [3], [3], [0, 1], [0, 1], torch.float32)
        return [b.lower_op("aten::_softmax", products, -1, False, outputs=[b.spec(products)])]

    (samples, heads, rows, _), columns = b.shape(x), b.shape(y)[2]
    spec = None if b.annotations is None else b.annotations.samples_and_heads(samples, heads)
    if spec is None:
        return compute(x, y)[0]
    result = TensorSpec(torch.float32, (samples, heads, rows, columns))
    return b.annotations.on_each_device(compute, (x, y), [result], spec)[0]


@pytest.mark.parametrize(
    ("samples", "heads", "split", "part"),
    [
        (8, 2, ("data", "?", "?", "?"), (2, 1, 3, 5)),
        (8, 2, (("data", "model"), "?", "?", "?"), (1, 2, 3, 5)),
        (2, 4, ("model", "?", "?", "?"), (1, 1, 3, 5)),
        (6, 2, ("data", "?", "?", "?"), (6, 2, 3, 5)),  # which does not divide
        (8, 2, ("?", "?", "data", "?"), (8, 2, 3, 5)),  # nobody says what the batch is
    ],
)
def test_each_device_computes_its_samples_and_heads(
    samples: int, heads: int, split: tuple[Any, ...], part: tuple[int, ...]
) -> None:
    x, y = torch.randn(samples, heads, 3, 5), torch.randn(samples, heads, 4, 5)
    shapes.clear()
    with counted() as n:
        z = lazyxla.constrain(x.to(DEVICE) + 1, MESH, split)
        result = scores(z, y.to(DEVICE))
        lazyxla.sync(wait=True)
    torch.testing.assert_close(result.cpu(), scores(x + 1, y))
    assert set(shapes) == {part}
    assert (n.executions, n.fallbacks, n.host_calls) == (1, 0, 0)
