"""Users' own operators (torch.library): rules, JAX rules, decompositions, and the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lazyxla
from lazyxla.dynamo import backend
from lazyxla.lowering import how, jax_rule, rule
from tests.own_operators import ON_CPU, X, bump, lower_scale, scale, surrounded
from tests.support import DEVICE, assert_same, check, counted, on_device, warned

# --- Rules ---------------------------------------------------------------------------------------


def test_a_rule_makes_it_part_of_the_program() -> None:
    rule("lazyxla_own::scale")(lower_scale)
    assert how("lazyxla_own::scale") == "rule"
    with counted() as n:
        check(surrounded, X)
    assert (n.executions, n.fallbacks, n.host_calls) == (1, 0, 0)


def test_its_numbers_may_change() -> None:
    """One program with the number built in, one that takes it as an input."""
    rule("lazyxla_own::scale")(lower_scale)
    x = on_device(X)
    lazyxla.sync()
    with counted() as n:
        for by in (0.5, 1.5, 2.5, 3.5):
            assert_same(scale(x, by), scale(X, by))
    assert n.compiles <= 2


def test_a_jax_rule() -> None:
    seen: list[Any] = []

    @jax_rule("lazyxla_own::scale", static=("offset",))
    def lower(x: Any, by: Any, offset: int) -> Any:
        seen.append((by.shape, offset))
        return x * by + offset

    assert how("lazyxla_own::scale") == "jax"
    with counted() as n:
        check(surrounded, X)
    assert (n.executions, n.fallbacks) == (1, 0)
    assert seen == [((), 1)]


def test_the_last_registration_counts() -> None:
    """What was compiled before is not used, whatever the kind of rule."""
    x = on_device(X)
    found = []

    def value() -> list[float]:
        found.append(scale(x, 2.0).tolist())
        return found[-1]

    assert value() == [0, 2, 4]  # on the host
    rule("lazyxla_own::scale")(lambda b, x, by, offset: b.full_like(x, 1))
    assert value() == [1, 1, 1]
    jax_rule("lazyxla_own::scale")(lambda x, by, offset: x * 0 + 2)
    assert value() == [2, 2, 2]
    rule("lazyxla_own::scale")(lambda b, x, by, offset: b.full_like(x, 3))
    assert value() == [3, 3, 3]
    with lazyxla.eager_mode(True):
        assert value() == [3, 3, 3]
        rule("lazyxla_own::scale")(lambda b, x, by, offset: b.full_like(x, 4))
        assert value() == [4, 4, 4]


def test_one_of_pytorchs_operators_can_be_given_another_rule() -> None:
    rule("aten::trunc")(lambda b, x: b.hlo.floor(x))
    assert on_device(torch.tensor([-1.5, 1.5])).trunc().tolist() == [-2, 1]
    rule("aten::geqrf")(lambda b, a: [a, b.select_dim(a, 0, 0)])  # has a host call otherwise
    with counted() as n:
        assert torch.geqrf(torch.ones(2, 2, device=DEVICE))[1].tolist() == [1, 1]
    assert n.host_calls == 0


def test_a_rule_may_come_before_the_operator() -> None:
    rule("lazyxla_own::later")(lambda b, x: b.scale(x, 2))

    @torch.library.custom_op("lazyxla_own::later", mutates_args=())
    def later(x: Tensor) -> Tensor:
        raise AssertionError("the rule is to be used")

    later.register_fake(torch.empty_like)
    assert later(on_device(X)).tolist() == [0, 2, 4]


def test_a_kernel_for_all_devices_runs_on_the_devices_tensors() -> None:
    @torch.library.custom_op("lazyxla_own::all", mutates_args=())
    def everywhere(x: Tensor) -> Tensor:
        return x.sin() + 1

    everywhere.register_fake(torch.empty_like)
    with counted() as n:
        check(lambda x: everywhere(x) * 2, X)
    assert (n.executions, n.fallbacks) == (1, 0)
    rule("lazyxla_own::all")(lambda b, x: b.full_like(x, 5))  # now preferred
    assert everywhere(on_device(X)).tolist() == [5, 5, 5]


def test_gradients() -> None:
    rule("lazyxla_own::scale")(lower_scale)

    def function(x: Tensor) -> Tensor:
        surrounded(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    with counted() as n:
        check(function, X.clone().requires_grad_())
    assert (n.fallbacks, n.host_calls) == (0, 0)


def test_lists_and_several_results() -> None:
    @torch.library.custom_op("lazyxla_own::several", **ON_CPU)
    def several(x: Tensor, ys: list[Tensor], n: int = 2) -> tuple[Tensor, list[Tensor], Tensor]:
        return x * n, [y + 1 for y in ys], x.sum()

    def fake(x: Tensor, ys: list[Tensor], n: int = 2) -> tuple[Tensor, list[Tensor], Tensor]:
        return torch.empty_like(x), [torch.empty_like(y) for y in ys], x.new_empty(())

    def function(x: Tensor, y: Tensor) -> Any:
        return several(x, [y, y * 2]), several(x, [], n=3)

    with counted() as n:
        check(function, X, torch.ones(2, 2))  # without a fake implementation
    assert n.fallbacks == 2
    several.register_fake(fake)

    @rule("lazyxla_own::several")
    def lower(b: Any, x: Any, ys: list[Any], n: int) -> list[Any]:
        more = [b.hlo.add(y, b.full_like(y, 1)) for y in ys]
        return [b.scale(x, n), *more, b.reduce(x, [0], "sum")]

    with counted() as n:
        check(function, X, torch.ones(2, 2))
    assert n.fallbacks == 0


def test_random_operators_draw_from_the_generator() -> None:
    library = torch.library.Library("lazyxla_own_noise", "DEF")
    seeded = torch.Tag.nondeterministic_seeded
    library.define("noise(Tensor x, *, Generator? generator=None) -> Tensor", tags=seeded)
    library.impl("noise", lambda x, generator=None: torch.empty_like(x), "Meta")
    noise = torch.ops.lazyxla_own_noise.noise

    @rule("lazyxla_own_noise::noise")
    def lower(b: Any, x: Any, generator: None) -> Any:
        return b.lower_op("aten::uniform", x, 0.0, 1.0, None)

    x = on_device(torch.zeros(100))
    torch.manual_seed(5)
    first, second = noise(x).cpu(), noise(x).cpu()
    torch.manual_seed(5)
    assert torch.equal(noise(x).cpu(), first)
    assert not torch.equal(first, second)
    generators = [torch.Generator(DEVICE).manual_seed(7) for _ in range(2)]
    a, b = (noise(x, generator=g).cpu() for g in generators)
    assert torch.equal(a, b)


# --- Decompositions ------------------------------------------------------------------------------


def test_a_registered_decomposition() -> None:
    library = torch.library.Library("lazyxla_own_parts", "DEF")
    library.define("center(Tensor x, float to=0.) -> Tensor")
    library.impl("center", lambda x, to=0.0: x - x.mean() + to, "CPU")
    library.impl("center", lambda x, to=0.0: torch.empty_like(x), "Meta")
    center = torch.ops.lazyxla_own_parts.center

    def decomposed(x: Tensor, to: float = 0.0) -> Tensor:
        return x - x.mean() + to

    torch._decomp.register_decomposition(center.default)(decomposed)
    assert how("lazyxla_own_parts::center") == "decomposition"
    with counted() as n:
        check(lambda x: center(x * 2) + center(x, to=1.0), X)
    assert (n.executions, n.fallbacks) == (1, 0)


def test_a_composite_operator() -> None:
    library = torch.library.Library("lazyxla_own_composite", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
    with counted() as n:
        x = X.clone().requires_grad_()
        check(lambda x: torch.autograd.grad(torch.ops.lazyxla_own_composite.twice(x).sum(), x), x)
    assert n.fallbacks == 0
    with pytest.raises(ValueError, match=r"twice is made of other operators \(CompositeImplicit"):
        rule("lazyxla_own_composite::twice")(lambda b, x: x)


# --- On the host ---------------------------------------------------------------------------------


def test_without_a_rule_it_runs_on_the_host() -> None:
    assert how("lazyxla_own::scale") == "host"
    lazyxla.reset_counters()
    check(surrounded, X)
    x = X.clone().requires_grad_()
    check(lambda x: torch.autograd.grad(surrounded(x).sum(), x), x)
    assert lazyxla.fallbacks() == {"lazyxla_own::scale": 3}


def test_without_a_fake_implementation_a_rule_is_of_no_use(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    calls = []

    @torch.library.custom_op("lazyxla_own::unknown", **ON_CPU)
    def unknown(x: Tensor) -> Tensor:
        calls.append(x.tolist())
        return x + 1

    rule("lazyxla_own::unknown")(lambda b, x: x)
    assert unknown(on_device(X)).tolist() == [1, 2, 3]
    assert calls == [[0, 1, 2]]  # never with made-up data
    text = "lazyxla_own::unknown has no meta function, which would tell its result's shape,"
    assert text in warned(capfd, recwarn)


def test_a_result_whose_shape_depends_on_data() -> None:
    @torch.library.custom_op("lazyxla_own::positive", **ON_CPU)
    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    @positive.register_fake
    def _(x: Tensor) -> Tensor:
        return x.new_empty(torch.library.get_ctx().new_dynamic_size())

    rule("lazyxla_own::positive")(lambda b, x: x)
    with counted() as n:
        check(lambda x: positive(x - 1) * 2, X)
    assert n.fallbacks == 1


# --- Operators that write ------------------------------------------------------------------------


def bump_twice(x: Tensor, by: Tensor) -> Any:
    view = x[1:]
    version = view._version
    total = bump(view, by) + bump(view, by + 1)
    assert view._version > version
    return total, view, x * 2


def test_writing_on_the_host_and_by_the_functional_counterpart() -> None:
    by = torch.ones(2)
    with counted() as n:
        check(bump_twice, X, by)
    assert n.fallbacks == 2
    library = torch.library.Library("lazyxla_own", "FRAGMENT")
    library.define("bump_functional(Tensor x, Tensor by) -> (Tensor, Tensor)")
    library.impl("bump_functional", lambda x, by: (x.new_empty(()), torch.empty_like(x)), "Meta")

    @rule("lazyxla_own::bump_functional")
    def lower(b: Any, x: Any, by: Any) -> list[Any]:
        new = b.hlo.add(x, by)
        return [b.reduce(new, [0], "sum"), new]

    with counted() as n:
        check(bump_twice, X, by)
    assert (n.fallbacks, n.executions) == (0, 1)
    # A result that is not used is not computed; the write is.
    x = on_device(X)
    bump(x, x)
    assert x.tolist() == [0, 2, 4]


# --- Compiled functions --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rule", "jax", "host"])
def test_in_compiled_functions(kind: str, fresh_dynamo: None) -> None:
    if kind == "rule":
        rule("lazyxla_own::scale")(lower_scale)
    elif kind == "jax":
        jax_rule("lazyxla_own::scale")(lambda x, by, offset: x * by + offset)

    def function(x: Tensor) -> Tensor:
        return torch.autograd.grad(surrounded(x).square().sum(), x)[0]

    x = X.clone().requires_grad_()
    expected = function(x)
    for compiled in (lazyxla.compile(function), torch.compile(surrounded, backend=backend)):
        ours = on_device(x)
        lazyxla.sync()
        with counted() as n:
            result = compiled(ours)
            if compiled.__name__ == "surrounded":
                result = torch.autograd.grad(result.square().sum(), ours)[0]
            lazyxla.sync(wait=True)
        assert_same(result, expected)
        assert n.fallbacks == (2 if kind == "host" else 0)
        assert n.executions == 1 or kind == "host"


def test_a_writing_operator_in_a_compiled_function(fresh_dynamo: None) -> None:
    def function(x: Tensor, by: Tensor) -> Any:
        y = x + 1
        return bump(y, by), y * 2

    compiled = torch.compile(function, backend=backend)
    assert_same(compiled(on_device(X), on_device(X)), function(X, X))


def test_a_rule_given_after_tracing_holds_for_the_next_trace(fresh_dynamo: None) -> None:
    x = on_device(X)
    for fallbacks in (1, 0):
        torch._dynamo.reset()
        with counted() as n:
            assert_same(torch.compile(surrounded, backend=backend)(x), surrounded(X))
        assert n.fallbacks == fallbacks
        rule("lazyxla_own::scale")(lower_scale)
