"""Element-wise operators that are programs of their own, in fewer dimensions."""

import pytest
import torch

import lazyxla
from lazyxla import lowering
from lazyxla.lowering import Ref, registry
from lazyxla.lowering.cpu import flat
from lazyxla.lowering.cpu.flat import flatten, group_dimensions, merge
from tests.lowering.harness import OnHost, check, record, text
from tests.support import DEVICE, assert_same, counted


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also small programs are flattened."""
    monkeypatch.setattr(flat, "_MANY", 1)


@pytest.mark.parametrize(
    ("operands", "shapes"),
    [
        (((4, 8, 128, 32), (4, 8, 128, 32)), ((131072,), (131072,))),
        (((4, 8, 128, 32), (128, 32)), ((32, 4096), (1, 4096))),
        (((4, 8, 16, 32), (4, 8, 1, 1)), ((32, 512), (32, 1))),
        (((4, 8, 16, 32), (8, 1, 1)), ((4, 8, 512), (1, 8, 1))),
        (((2, 3, 1), (3, 5)), ((2, 3, 1), (1, 3, 5))),
        (((2, 1, 3, 1), (2, 1, 3, 5)), ((6, 1), (6, 5))),
        (((1, 2, 3, 1), (3, 1)), ((2, 3), (1, 3))),
        (((2, 3), ()), ((6,), ())),
        (((2, 3), (1,)), ((6,), (1,))),
        (((1, 1), (1, 1)), ((1,), (1,))),
        (((7,), (7,)), ((7,), (7,))),
    ],
)
def test_dimensions_merge_unless_an_operand_is_repeated_along_one(
    operands: tuple[tuple[int, ...], ...], shapes: tuple[tuple[int, ...], ...]
) -> None:
    shape = tuple(torch.broadcast_shapes(*operands))
    groups = group_dimensions(shape, operands)
    assert tuple(merge(operand, groups) for operand in operands) == shapes
    assert sorted(dim for group in groups for dim in group) == list(range(-len(shape), 0))


def test_the_loop_runs_over_one_dimension() -> None:
    module = text("aten::neg", torch.ones(4, 8, 128, 32))
    assert "stablehlo.negate %arg0 : tensor<131072xf32>" in module
    assert 'mhlo.frontend_attributes = {inlineable = "false"}' in module
    assert "main(%arg0: tensor<4x8x128x32xf32>) -> tensor<4x8x128x32xf32>" in module


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        ("aten::neg", [(128, 31)]),  # too few elements
        ("aten::neg", [(64, 64)]),  # a last dimension that is long enough
        ("aten::neg", [(8192,)]),
        ("aten::mul.Tensor", [(4096, 32), (32,)]),  # repeated along the first only
        ("aten::cumsum", [(4096, 32)]),  # not element-wise
    ],
)
def test_what_stays_as_it_is(op: str, shapes: list[tuple[int, ...]]) -> None:
    extra = (0,) if op == "aten::cumsum" else ()
    assert flatten(record(op, *map(torch.ones, shapes), *extra).program) is None


def test_programs_of_several_operators_stay_as_they_are() -> None:
    one = record("aten::neg", torch.ones(4096, 32)).program
    assert flatten(one) is not None
    node = one.nodes[0]
    two = one._replace(nodes=[node, node._replace(args=(Ref(1),))], outputs=[Ref(2)])
    assert flatten(two) is None


def test_other_platforms_get_the_shapes_as_they_are() -> None:
    program = record("aten::neg", torch.ones(4096, 32)).program
    assert "inlineable" not in lowering.lower_to_text(program, "cuda")


def test_a_users_rule_sees_the_shapes_as_they_are() -> None:
    seen: list[tuple[int, ...]] = []

    def rule(b, x):  # type: ignore[no-untyped-def]
        seen.append(b.shape(x))
        return b.hlo.negate(x)

    registry.rule("aten::neg")(rule)
    text("aten::neg", torch.ones(4096, 32))
    assert seen == [(4096, 32)]


X, Y = torch.randn(4, 3, 5, 7), torch.randn(5, 7)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        ("aten::add.Tensor", (X, Y), {"alpha": 3}),
        ("aten::add.Tensor", (X, X.to(torch.bfloat16)), {}),
        ("aten::mul.Tensor", (X.to(torch.int32), torch.tensor(2)), {}),
        ("aten::mul.Tensor", (X.to(torch.bfloat16), torch.tensor(2.5, dtype=torch.float64)), {}),
        ("aten::mul.Tensor", (X, OnHost(torch.tensor(2.5))), {}),
        ("aten::mul.Tensor", (X, X[:, :1, :1, :1]), {}),
        ("aten::where.self", (X > 0, X, Y), {}),
        ("aten::addcmul", (X, Y, X), {"value": 0.5}),
        ("aten::lerp.Scalar", (X, X + 1, 0.25), {}),
        ("aten::pow.Tensor_Scalar", (X, 2), {}),
        ("aten::gt.Tensor", (X, Y), {}),
        ("aten::silu_backward", (X, X + 1), {}),
        ("aten::clamp", (X, -0.5, None), {}),
        ("aten::div.Tensor_mode", (X, Y), {"rounding_mode": "floor"}),
        ("aten::gelu", (X,), {"approximate": "tanh"}),
    ],
)
def test_values(
    of_any_size: None, op: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    assert flatten(record(op, *args, **kwargs).program) is not None
    check(op, *args, **kwargs)


def test_memory_is_still_taken_over() -> None:
    """A write in place takes no memory of its own."""
    x = torch.randn(4, 8, 128, 32)
    y = x.to(DEVICE)
    with lazyxla.eager_mode(True):
        y.add_(1)
        lazyxla.sync(wait=True)
        before = lazyxla.memory_allocated()
        lazyxla.reset_peak_memory_stats()
        with counted() as n:
            for _ in range(3):
                y.add_(1)
            lazyxla.sync(wait=True)
        assert (n.compiles, n.executions) == (0, 3)
        assert lazyxla.max_memory_allocated() == before
    assert_same(y, x + 4)
