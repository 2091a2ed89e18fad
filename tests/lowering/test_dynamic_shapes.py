"""Modules for several sizes become one for all, or an error says why not."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from lazyxla.lowering import DifferentProgramsError
from lazyxla.lowering.dynamic_shapes import generalize
from lazyxla.lowering.mlir import entered
from lazyxla.lowering.size_polynomials import Points

ANY = (1, 1 << 20)

Form = Callable[[int], tuple[str, str]]
"""For a size n, what is done with %x: tensor<nx4xf32>, and the type of %y, the result."""


def generalized(form: Form, bounds: tuple[int, int] = ANY) -> str:
    points = Points([bounds])
    with entered() as world:
        modules = []
        for (n,) in points.sizes:
            body, result = form(n)
            module = world.ir.Module.parse(
                f"func.func public @main(%x: tensor<{n}x4xf32>) -> {result} {{\n"
                f"%zero = stablehlo.constant dense<0.0> : tensor<f32>\n"
                f"%y = {body} -> {result}\nreturn %y : {result}\n}}"
            )
            stream = io.BytesIO()
            module.operation.write_bytecode(stream)
            modules.append(stream.getvalue())
        return str(world.ir.Module.parse(generalize(modules, points, [bounds])))


def padded(n: int) -> tuple[str, str]:
    amounts = f"low = [0, 0], high = [{64 - n}, 0], interior = [0, 0]"
    types = f"(tensor<{n}x4xf32>, tensor<f32>)"
    return f"stablehlo.pad %x, %zero, {amounts} : {types}", "tensor<64x4xf32>"


def cut(n: int) -> tuple[str, str]:
    return f"stablehlo.slice %x [0:3, 0:4] : (tensor<{n}x4xf32>)", "tensor<3x4xf32>"


def flat(n: int) -> tuple[str, str]:
    return f"stablehlo.reshape %x : (tensor<{n}x4xf32>)", f"tensor<{4 * n}xf32>"


def halved(n: int) -> tuple[str, str]:
    return f"stablehlo.slice %x [0:{n // 2}, 0:4] : (tensor<{n}x4xf32>)", f"tensor<{n // 2}x4xf32>"


def chosen(n: int) -> tuple[str, str]:
    name = "sine" if n > 5 else "cosine"
    return f"stablehlo.{name} %x : (tensor<{n}x4xf32>)", f"tensor<{n}x4xf32>"


def test_what_sizes_allow() -> None:
    text = generalized(flat)
    assert "stablehlo.dynamic_reshape" in text
    assert "(%arg0: tensor<?x4xf32>, %arg1: tensor<i64>) -> tensor<?xf32>" in text
    assert "stablehlo.dynamic_pad" in generalized(padded, (1, 64))
    assert "stablehlo.slice" in generalized(cut, (3, 1 << 20))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (padded, r"stablehlo.pad .* is negative for sizes \(1000,\)"),
        (cut, r"lowered for sizes .* does not hold for \(1,\)"),
        (halved, r"stablehlo.slice .* a number is 1, 3, 5, 10: no polynomial"),
        (chosen, r"it is stablehlo.cosine or stablehlo.sine"),
    ],
)
def test_what_only_some_sizes_allow_is_refused(form: Form, message: str) -> None:
    with pytest.raises(DifferentProgramsError, match=message):
        generalized(form)
