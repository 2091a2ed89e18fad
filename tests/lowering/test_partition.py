"""The annotations of programs for many devices."""

from __future__ import annotations

from typing import Any

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
    packed = platform == "cuda" and op != "uniform"
    whole = "_philox_below" if packed else "rng_bit_generator"
    assert whole in lower_to_text(program, target)
    results = (None,) * len(program.outputs)
    assert whole not in lower_to_text(spread(program, *results), target)


def test_a_write_at_one_place_stays_a_scatter() -> None:
    """The partitioner would gather a slice whose place is known only when it runs."""
    program = record("aten::index_copy", torch.empty(8, 6), 0, torch.tensor([3]), torch.ones(1, 6))
    assert "dynamic_update_slice" in lower_to_text(program.program, "cpu")
    text = lower_to_text(spread(program.program, None), "cpu")
    assert "stablehlo.scatter" in text
    assert "dynamic_update_slice" not in text


X, INDEX = torch.zeros(4, 6, 8), torch.zeros(4, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("linear", (X, torch.zeros(5, 8), torch.zeros(5))),
        ("embedding_dense_backward", (X, INDEX, 7, -1, False)),
    ],
)
def test_samples_and_positions_stay_apart(op: str, arguments: tuple[Any, ...]) -> None:
    """Of two dimensions that were made one the partitioner could split only the first."""
    program = record(f"aten::{op}", *arguments).program
    assert "tensor<24x" in lower_to_text(program, "cpu")
    assert "tensor<24x" not in lower_to_text(spread(program, None), "cpu")


def test_sums_of_rows_are_matmuls_on_one_device_only() -> None:
    program = record("aten::nansum", torch.zeros(8, 16, 5, 16), [2, 3]).program
    assert "tensor<128x" in lower_to_text(program, "cpu")
    assert "tensor<128x" not in lower_to_text(spread(program, None), "cpu")


def test_products_of_more_dimensions_take_the_cpus_forms_too() -> None:
    """Rows count together, whatever dimensions they have."""
    turned, gap = ((2, 8, 768), (3072, 768)), ((4, 128, 1024), (128, 1024))
    for shapes in (turned, gap):
        program = record("aten::linear", *(torch.empty(shape) for shape in shapes)).program
        text = lower_to_text(spread(program, None), "cpu")
        assert "optimization_barrier" in text
        assert ("stablehlo.pad" in text) == (shapes is gap)
    small = record("aten::linear", torch.empty(2, 8, 16), torch.empty(4, 16)).program
    assert "optimization_barrier" not in lower_to_text(spread(small, None), "cpu")
