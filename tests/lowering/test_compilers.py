"""What one of XLA's compilers needs, or does badly, is in the programs for it alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lazyxla.lowering import Program, lower_to_text
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.value import Value
from tests.lowering.bench import Bench
from tests.lowering.harness import record

PLATFORMS = ("cpu", "cuda", "tpu")


def holds(program: Program, operation: str) -> list[str]:
    """The platforms whose programs have the operation."""
    return [p for p in PLATFORMS if f"stablehlo.{operation}" in lower_to_text(program, p)]


@pytest.mark.parametrize(
    ("op", "arguments", "options"),
    [
        ("_pdist_forward", (torch.randn(4, 3), math.inf), {}),
        ("abs", (torch.randn(3, dtype=torch.complex64),), {}),
        ("segment_reduce", (torch.randn(4, 3), "max"), {"lengths": torch.tensor([1, 3])}),
    ],
)
def test_maxima_look_for_nan_where_the_compiler_drops_it(
    op: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """They tell nan by comparing a number with itself."""
    program = record(f"aten::{op}", *arguments, **options).program
    texts = {p: lower_to_text(program, p) for p in PLATFORMS}
    assert ["compare NE" in texts[p] for p in PLATFORMS] == [True, False, False]


def test_stacks_of_a_loop_are_made_apart_on_the_cpu(bench: Bench) -> None:
    def rule(b: Builder, x: Value) -> Value:
        return b.stacked_apart([x])[0]

    x = torch.ones(3, 2)
    assert holds(bench.program(rule, (x,), [x]), "optimization_barrier") == ["cpu"]


def test_bits_of_another_width_are_apart_where_the_simplifier_merges_them(bench: Bench) -> None:
    def rule(b: Builder, x: Value) -> Value:
        return b.bitcast_to_width(x, torch.int16, (3, 2))

    x = torch.ones(3)
    program = bench.program(rule, (x,), [x.view(torch.int16).reshape(3, 2)])
    assert holds(program, "optimization_barrier") == ["cpu", "cuda"]
