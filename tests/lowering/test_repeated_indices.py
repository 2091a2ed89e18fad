"""Indices that are repeated along a dimension address whole rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from lazyxla.lowering import lower_to_text
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.value import Value
from tests.lowering.bench import Bench

_SCATTERED = {
    "scatter.src": (),
    "scatter_add": (),
    "scatter.reduce": ("multiply",),
    **{f"scatter_reduce.two {kind}": (kind, True) for kind in ("sum", "mean", "amax", "prod")},
    "scatter_reduce.two": ("amin", False),
}


def call(name: str, *args: Any, **options: Any) -> torch.Tensor:
    name, _, overload = name.split()[0].partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")(*args, **options)


def rows_of(bench: Bench, rule: Any, inputs: tuple[Any, ...], expected: torch.Tensor) -> str:
    """The program, as text; its values are compared with the expected ones."""
    bench.check(rule, *inputs, expected=expected)
    return lower_to_text(bench.program(rule, inputs, [expected]), "tpu")


def cases(count: int) -> list[tuple[tuple[int, ...], int, list[int]]]:
    """Random (shape, dim, repeated dimensions), of which some are repeated and others not."""
    draw = random.Random(0)
    found = []
    for _ in range(count):
        shape = tuple(draw.randint(2, 4) for _ in range(draw.randint(2, 4)))
        dim = draw.randrange(len(shape))
        others = [d for d in range(len(shape)) if d != dim]
        found.append((shape, dim, sorted(draw.sample(others, draw.randint(0, len(others))))))
    return found


@pytest.mark.parametrize(("shape", "dim", "repeated"), cases(12))
def test_gather(shape: tuple[int, ...], dim: int, repeated: list[int], bench: Bench) -> None:
    sizes = [1 if d in repeated else n for d, n in enumerate(shape)]
    sizes[dim] = 5
    index = torch.randint(0, shape[dim], sizes)
    whole = [5 if d == dim else n for d, n in enumerate(shape)]
    x = torch.randn(shape)

    def rule(b: Builder, x: Value, index: Value) -> Any:
        return b.lower_op("aten::gather", x, dim, b.broadcast_to(index, whole), False)

    expected = x.gather(dim, index.expand(whole))
    text = rows_of(bench, rule, (x, index), expected)
    assert (f"offset_dims = {repeated}" in text) == bool(repeated)


@pytest.mark.parametrize("name", _SCATTERED)
def test_scatter(name: str, bench: Bench) -> None:
    for shape, dim, repeated in cases(4):
        sizes = [1 if d in repeated else n for d, n in enumerate(shape)]
        sizes[dim] = 5
        index = torch.randint(0, shape[dim], sizes)
        if name == "scatter.src":  # where an index occurs twice, either may win
            sizes[dim] = shape[dim]
            index = torch.rand(sizes).argsort(dim)
        whole = [sizes[dim] if d == dim else n for d, n in enumerate(shape)]
        x, source = torch.randn(shape), torch.randn(whole)

        def rule(b: Builder, x: Value, index: Value, source: Value, dim: int = dim) -> Any:
            more = _SCATTERED[name]
            index = b.broadcast_to(index, source.shape)
            return b.lower_op(f"aten::{name.split()[0]}", x, dim, index, source, *more)

        more, options = list(_SCATTERED[name]), {}
        if name.startswith("scatter_reduce"):
            options["include_self"] = more.pop()
        if name == "scatter.reduce":
            options["reduce"] = more.pop()
        expected = call(name, x, dim, index.expand(whole), source, *more, **options)
        text = rows_of(bench, rule, (x, index, source), expected)
        assert (f"update_window_dims = {repeated}" in text) == bool(repeated)


def test_an_index_that_is_smaller_than_the_tensor_is_none_of_rows(bench: Bench) -> None:
    """torch.scatter may write to a part of each row."""
    x, source = torch.randn(4, 5), torch.randn(3, 2)
    index = torch.tensor([[0], [2], [3]])

    def rule(b: Builder, x: Value, index: Value, source: Value) -> Any:
        return b.lower_op("aten::scatter_add", x, 0, b.broadcast_to(index, (3, 2)), source)

    expected = x.scatter_add(0, index.expand(3, 2), source)
    assert "update_window_dims" not in rows_of(bench, rule, (x, index, source), expected)
