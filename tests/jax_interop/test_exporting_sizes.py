"""Exported programs with symbolic dimensions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn

import lazyxla
from lazyxla.lowering import LoweringError
from tests import vision  # before transformers, which imports torchvision
from tests.conftest import RunPython
from tests.jax_interop.exporting import compare, transformer

jax.config.update("jax_platforms", "cpu")


class Pair(nn.Module):
    """Arguments whose dimensions depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: dict[str, Tensor], flag: bool = True) -> tuple[Tensor, ...]:
        z = self.layer(x)
        return (z + y["b"].mean(0) - y["a"], z.sum(0)) if flag else (z,)


BATCH, TIME = torch.export.Dim("batch", max=100), torch.export.Dim("time", min=2)


@pytest.mark.parametrize(
    "spec",
    [
        {"x": {0: 2 * BATCH}, "y": {"b": {0: TIME}, "a": {0: 2 * BATCH}}},
        ((2 * BATCH, None), {"b": (TIME, None), "a": [2 * BATCH, None]}),
    ],
    ids=["names", "positions"],
)
def test_symbolic_dimensions(spec: Any, tmp_path: Path) -> None:
    def args(batch: int, time: int) -> tuple[Any, ...]:
        x, a, b = torch.randn(2 * batch, 4), torch.randn(2 * batch, 4), torch.randn(time, 4)
        return x, {"b": b, "a": a}

    module = Pair()
    exported = lazyxla.export(module, args(3, 5), dynamic_shapes=spec)
    manifest = exported.manifest
    assert manifest["dimensions"]["time"] == {"min": 2, "max": None}
    assert manifest["dimensions"]["batch"]["max"] == 100
    shapes = {each["name"]: each["shape"] for each in manifest["inputs"]}
    assert (shapes["0"], shapes["1.a"], shapes["1.b"]) == (
        *(["2*batch", 4], ["2*batch", 4], ["time", 4]),
    )
    assert [each["shape"] for each in manifest["outputs"]] == [["2*batch", 4], [4]]
    exported.save(tmp_path)
    loaded = lazyxla.load_exported(tmp_path)
    for batch, time in ((2, 2), (3, 7), (50, 300)):
        given = args(batch, time)
        found = loaded(*lazyxla.to_device(given))
        for mine, theirs in zip(found, module(*given), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs.detach())
    before = lazyxla.counters()["compiles"]
    loaded(*lazyxla.to_device(args(3, 7)))
    lazyxla.sync(wait=True)
    assert lazyxla.counters()["compiles"] == before
    with pytest.raises(ValueError, match=r"time may be 2 or more, got 1"):
        loaded(*lazyxla.to_device(args(3, 1)))
    with pytest.raises(ValueError, match=r"dimension 2\*batch has two sizes: 6 and 8"):
        loaded(*lazyxla.to_device((args(3, 2)[0], args(4, 2)[1])))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "resnet18"])
def test_networks_with_symbolic_dimensions(
    kind: str, run_python: RunPython, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=64)
    inputs: dict[str, Tensor]
    if kind == "resnet18":
        model, inputs = vision.models.resnet18(num_classes=10), {"x": torch.randn(2, 3, 64, 64)}
        shapes = {"x": {0: batch}}
        other = {"x": torch.randn(5, 3, 64, 64)}
    else:
        model, inputs = transformer(kind)
        shapes = {"input_ids": {0: batch, 1: sequence}}
        other = {"input_ids": torch.randint(100, (3, 33))}
    model.eval()
    program = torch.export.export(model, (), inputs, dynamic_shapes=shapes)
    exported = lazyxla.export(program, platforms=("cpu",))
    for given in (other, {name: x[:1] for name, x in inputs.items()}):
        compare(exported, model, run_python, tmp_path, (), given)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: nn.functional.max_pool2d(x[None, None], (2, 1)), r"no polynomial"),
        (lambda x: x * x.shape[0] ** 0.5, r"a number is"),
    ],
    ids=["pooled", "root"],
)
def test_what_is_no_polynomial_of_sizes(function: Callable[..., Any], message: str) -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    spec = ({0: torch.export.Dim("n", min=4)},)
    with pytest.raises(LoweringError, match=message):
        lazyxla.export(Module(), (torch.randn(6, 2),), dynamic_shapes=spec)


def test_dynamic_shapes_are_those_of_the_exported_program() -> None:
    program = torch.export.export(nn.ReLU(), (torch.ones(3),))
    with pytest.raises(TypeError, match="has its dynamic shapes already"):
        lazyxla.export(program, dynamic_shapes=({0: torch.export.Dim("n")},))
