"""The annotations of programs for many devices."""

from __future__ import annotations

import pytest
import torch

import lazyxla
from lazyxla.lowering import Node, Program, Ref, Target, TensorSpec, lower, lower_to_text
from lazyxla.lowering.program import Partition
from tests.lowering.harness import record

AXES = (("data", 4), ("model", 2))
ROWS = ((("data", 1, 4),), ())


def spread(
    program: Program, *results: tuple[tuple[tuple[str, int, int], ...], ...] | None
) -> Program:
    inputs = tuple(((("data", 1, 4),), *[()] * (len(s.shape) - 1)) for s in program.inputs)
    return program._replace(partition=Partition(AXES, inputs, results))


def doubled(*shape: int) -> Program:
    spec = TensorSpec(torch.float32, shape)
    node = Node("aten::add.Tensor", (Ref(0), Ref(0), 1), (spec,))
    return Program([spec], [node], [Ref(1)], [], {0: 0})


def test_inputs_and_results_are_annotated() -> None:
    text = lower_to_text(spread(doubled(8, 6), ROWS), "cpu")
    assert 'sdy.mesh @mesh = <["data"=4, "model"=2]>' in text
    assert text.count('#sdy.sharding<@mesh, [{"data"}, {}]>') == 2
    assert "tf.aliasing_output = 0" in text


def test_a_result_that_the_partitioner_spreads_is_not_annotated() -> None:
    text = lower_to_text(spread(doubled(8, 6), None), "cpu")
    assert text.count("#sdy.sharding<") == 1


def test_parts_of_axes() -> None:
    half = ((("data", 2, 2),), (("model", 1, 2),))
    text = lower_to_text(spread(doubled(8, 6), half), "cpu")
    assert '[{"data":(2)2}, {"model"}]' in text


def test_sizes_that_do_not_divide_are_padded() -> None:
    program = spread(doubled(7, 6), ROWS)
    text = lower_to_text(program, "cpu")
    assert "%arg0: tensor<8x6xf32>" in text
    assert "-> (tensor<8x6xf32>" in text
    assert "stablehlo.slice %arg0 [0:7, 0:6]" in text
    assert lower(program, "cpu", verify=True).artifact


def test_constraints() -> None:
    mesh = lazyxla.Mesh((1,), ("data",))
    sharding = mesh._sharding_text(("data", "?"), 2)
    spec = TensorSpec(torch.float32, (8, 6))
    node = Node("lazyxla::constrain", (Ref(0), sharding), (spec,))
    program = Program([spec], [node], [Ref(1)], [], {})
    assert "sdy" not in lower_to_text(program, "cpu")  # on one device it says nothing
    partition = Partition((("data", 1),), ((), ()), (None,))
    text = lower_to_text(program._replace(partition=partition._replace(inputs=(((), ()),))), "cpu")
    assert "sdy.sharding_constraint %arg0 <@mesh, [{}, {?}]>" in text


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("op", ["uniform", "bernoulli.p", "native_dropout"])
def test_random_numbers_are_made_where_they_are_needed(op: str, platform: str) -> None:
    """XLA's generator would be run whole by every device."""
    arguments = {"uniform": (), "bernoulli.p": (0.3,), "native_dropout": (0.3, True)}[op]
    program = record(f"aten::{op}", torch.empty(8, 6), *arguments).program
    target = Target(platform)
    assert "rng_bit_generator" in lower_to_text(program, target)
    results = (None,) * len(program.outputs)
    assert "rng_bit_generator" not in lower_to_text(spread(program, *results), target)
