"""Lowering whole programs: inputs, slots, donation, results, errors."""

import pytest
import torch
from jaxlib.mlir.dialects import stablehlo

from lazyxla.lowering import (
    Geometry,
    LoweringError,
    Node,
    Program,
    Ref,
    Slot,
    SlotSpec,
    Target,
    TensorSpec,
    lower,
    lower_to_text,
    registry,
)
from tests.lowering.harness import execute

F32 = torch.float32
VECTOR = TensorSpec(F32, (3,))
X = torch.tensor([1.0, 2.0, 3.0])


def number(value: float, variable: bool = False) -> SlotSpec:
    kind = torch.float64 if isinstance(value, float) else torch.int64
    return SlotSpec(value, kind, True, variable)


def adding(*slots: SlotSpec) -> Program:
    """x + x * slot 0 + x * slot 1 + ..."""
    nodes = [
        Node("aten::add.Tensor", (Ref(i), Ref(0), Slot(i)), (VECTOR,)) for i in range(len(slots))
    ]
    return Program([VECTOR], nodes, [Ref(len(slots))], list(slots), {})


def test_constant_slots_are_no_parameters() -> None:
    program = adding(number(2.0), number(3))
    assert "main(%arg0: tensor<3xf32>) -> tensor<3xf32>" in lower_to_text(program, "cpu")
    (result,), static = execute(program, [X])
    torch.testing.assert_close(result, X * 6)
    assert static == set()


def test_variable_slots_come_in_one_buffer_per_kind() -> None:
    program = adding(
        number(2.0, True), number(3, True), number(4.0), number(5, True), number(6.0, True)
    )
    text = lower_to_text(program, "cpu")
    parameters = "%arg0: tensor<3xf32>, %arg1: tensor<2xf64>, %arg2: tensor<2xi64>"
    assert f"main({parameters}) -> tensor<3xf32>" in text
    (result,), _ = execute(program, [X])
    torch.testing.assert_close(result, X * 21)


def test_a_variable_slot_keeps_its_parameter_when_no_rule_reads_it() -> None:
    program = adding(number(2.0))._replace(slots=[number(2.0), number(7, True)])
    assert "%arg1: tensor<1xi64>" in lower_to_text(program, "cpu")


@pytest.fixture
def register():  # type: ignore[no-untyped-def]
    """`register(f)` makes f the rule of test::op for one test."""
    return registry.rule("test::op")


def one_node(*args: object, outputs: tuple[TensorSpec, ...] = (VECTOR,)) -> Program:
    node = Node("test::op", args, outputs)
    refs = [Ref(1 + i) for i in range(len(outputs))]
    return Program([VECTOR], [node], refs, [number(2.0), number(3.0)], {})


def test_static_slots_are_reported(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def power(b, x, first, second):  # type: ignore[no-untyped-def]
        for _ in range(int(second) - 1):
            x = b.hlo.multiply(x, x)
        return b.scale(x, first)

    lowered = lower(one_node(Ref(0), Slot(0), Slot(1)), "cpu", verify=True)
    assert lowered.static_slots == (1,)


def test_looking_at_a_constant_does_not_make_it_static(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def look(b, x, first):  # type: ignore[no-untyped-def]
        assert b.is_const(first, 2)
        assert b.is_const(first)
        assert not b.is_const(first, 1)
        return x

    assert lower(one_node(Ref(0), Slot(0)), "cpu").static_slots == ()


def test_a_variable_slot_can_become_static(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def scaled(b, x, first):  # type: ignore[no-untyped-def]
        return x if b.is_const(first, 1) else b.scale(x, float(first))

    first = one_node(Ref(0), Slot(0))
    program = first._replace(slots=[number(2.5, True), number(4.5, True)])
    assert "%arg1: tensor<1xf64>" in lower_to_text(program, "cpu")
    (result,), static = execute(program, [X])
    torch.testing.assert_close(result, X * 2.5)
    assert static == {0}


def test_donation() -> None:
    program = adding(number(2.0))._replace(
        inputs=[VECTOR, VECTOR],
        outputs=[Ref(1), Ref(2)],
        donations={0: 1},
        nodes=[Node("aten::add.Tensor", (Ref(0), Ref(1), Slot(0)), (VECTOR,))],
    )
    text = lower_to_text(program, "cpu")
    assert "%arg0: tensor<3xf32> {tf.aliasing_output = 1 : i32}, %arg1: tensor<3xf32>)" in text
    lower(program, "cpu", verify=True)


def test_result_dtype_is_converted(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def whole(b, x):  # type: ignore[no-untyped-def]
        return b.convert(x, torch.int32)

    (result,), _ = execute(one_node(Ref(0)), [X])
    assert result.dtype == torch.float32


def test_undefined_results_are_left_out(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def gradients(b, x):  # type: ignore[no-untyped-def]
        return x, None, b.hlo.negate(x)

    results, _ = execute(one_node(Ref(0), outputs=(VECTOR, VECTOR)), [X])
    torch.testing.assert_close(results, [X, -X])


def test_lists_of_tensors_are_arguments_and_results(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def negate_all(b, xs):  # type: ignore[no-untyped-def]
        return [b.hlo.negate(x) for x in xs]

    results, _ = execute(one_node([Ref(0), Ref(0)], outputs=(VECTOR, VECTOR)), [X])
    torch.testing.assert_close(results, [-X, -X])


def test_random_operators_get_seed_and_ordinal(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def key(b):  # type: ignore[no-untyped-def]
        seed, ordinal = b.rng
        assert b.spec(seed) == (torch.uint64, ())
        return b.hlo.subtract(seed, ordinal)

    node = Node("test::op", (), (TensorSpec(torch.uint64, ()),), (Slot(0), Slot(1)))
    slots = [number(-1, True), number(5, True)]
    (result,), _ = execute(Program([], [node], [Ref(0)], slots, {}), [])
    assert result.item() == 2**64 - 6


def test_internal_operators() -> None:
    nodes = [
        Node("lazyxla::constant", (Slot(0),), (TensorSpec(torch.bfloat16, ()),)),
        Node("lazyxla::undefined", (), (TensorSpec(torch.int16, (2,)),)),
        Node("lazyxla::cast", (Ref(0), torch.int64), (TensorSpec(torch.int64, (3,)),)),
        Node("lazyxla::cast", (Slot(0), torch.int8), (TensorSpec(torch.int8, ()),)),
    ]
    program = Program([VECTOR], nodes, [Ref(i) for i in range(1, 5)], [number(2.5)], {})
    results, static = execute(program, [X * 1.7])
    expected = [
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.zeros(2, dtype=torch.int16),
        (X * 1.7).to(torch.int64),
        torch.tensor(2, dtype=torch.int8),
    ]
    torch.testing.assert_close(results, expected)
    assert not static


def test_an_input_can_be_an_output() -> None:
    program = Program([VECTOR], [], [Ref(0), Ref(0)], [], {})
    results, _ = execute(program, [X])
    torch.testing.assert_close(results, [X, X])


@pytest.mark.parametrize("version", ["1.0.0", "1.9.5", None, "99.0.0"])
def test_artifact_is_of_the_plugin_version_or_ours(version: str | None) -> None:
    artifact = lower(adding(number(2.0)), Target("cpu", stablehlo_version=version)).artifact
    wanted = stablehlo.get_current_version() if version in (None, "99.0.0") else version
    assert f"StableHLO_v{wanted}".encode() in artifact


# ---- errors ----


def test_unknown_operator() -> None:
    program = one_node(Ref(0), Slot(0), [1, 2])
    message = r"test::op\(float32\[3\], Scalar\(2.0, torch.float64\), \[1, 2\]\) cannot be lowered"
    with pytest.raises(LoweringError, match=message):
        lower(program, "cpu")


def test_error_in_a_rule_is_chained(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def broken(b, x):  # type: ignore[no-untyped-def]
        raise KeyError("lost")

    with pytest.raises(LoweringError, match=r"test::op\(float32\[3\]\)") as caught:
        lower(one_node(Ref(0)), "cpu")
    assert isinstance(caught.value.__cause__, KeyError)


def test_wrong_shape(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def wrong(b, x):  # type: ignore[no-untyped-def]
        return b.slice_dim(x, 0, 0, 2)

    with pytest.raises(LoweringError, match=r"returned shape \[2\], expected \[3\]"):
        lower(one_node(Ref(0)), "cpu")


def test_wrong_number_of_results(register) -> None:  # type: ignore[no-untyped-def]
    @register
    def wrong(b, x):  # type: ignore[no-untyped-def]
        return x, x

    with pytest.raises(LoweringError, match="returned 2 results, expected 1"):
        lower(one_node(Ref(0)), "cpu")


def test_view_beyond_its_storage() -> None:
    base, view = Geometry(F32, (3,), (1,), 0), Geometry(F32, (3,), (1,), 1)
    node = Node("lazyxla::view", (Ref(0), base, view), (VECTOR,))
    with pytest.raises(LoweringError, match=r"lazyxla::view\(float32\[3\].*beyond its storage"):
        lower(Program([VECTOR], [node], [Ref(1)], [], {}), "cpu")
