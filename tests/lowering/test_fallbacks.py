"""JAX rules and PyTorch decompositions."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazyxla.lowering import LoweringError, lower, lower_to_text, registry
from lazyxla.lowering.jax_call import _trace as jax_trace
from tests.lowering.harness import check, record, run, text


def use_jax(name: str, **options: Any) -> Callable[[Any], Any]:
    """jax_rule, for an operator that has an own rule besides."""
    registry._rules.pop(name, None)
    return registry.jax_rule(name, **options)


def use_decomposition(*operators: str) -> None:
    for name in operators:
        registry._rules.pop(name, None)
        registry._jax_rules.pop(name, None)


def test_jax_rule_with_dynamic_and_static_numbers() -> None:
    @use_jax("aten::lerp.Scalar")
    def lerp(x: Any, y: Any, weight: Any) -> Any:
        assert weight.shape == ()
        assert weight.weak_type
        return x + weight * (y - x)

    check("aten::lerp.Scalar", torch.randn(3), torch.randn(3), 0.25)

    @use_jax("aten::leaky_relu", static=("slope",))
    def leaky(x: Any, slope: Any) -> Any:
        import jax.numpy as jnp

        assert isinstance(slope, float)
        return jnp.where(x > 0, x, slope * x)

    check("aten::leaky_relu", torch.randn(3), 0.25)


def test_jax_rule_with_several_results_and_64_bits() -> None:
    @use_jax("aten::sort")
    def sort(x: Any, dim: int, descending: bool) -> Any:
        import jax.numpy as jnp

        order = jnp.argsort(x, dim, descending=descending)
        assert order.dtype == jnp.int64
        return jnp.take_along_axis(x, order, dim), order

    check("aten::sort", torch.randn(3, 4, dtype=torch.float64), 1, True)


def test_jax_rule_with_a_list_of_tensors_and_expected_outputs() -> None:
    @use_jax("aten::cat")
    def cat(tensors: Any, dim: int, *, outputs: Any) -> Any:
        import jax.numpy as jnp

        result = jnp.concatenate(tensors, dim)
        assert result.shape == outputs[0].shape
        return result

    check("aten::cat", [torch.randn(2, 3), torch.randn(4, 3)], 0)


def test_a_jax_function_is_traced_and_merged_once() -> None:
    traces = 0

    def shift(x: Any) -> Any:
        nonlocal traces
        traces += 1
        return x + 1

    @registry.rule("aten::addcmul")
    def twice(b: Any, x: Any, y: Any, z: Any, value: Any) -> Any:
        return b.hlo.multiply(b.call_jax(shift, x), b.call_jax(shift, y))

    x = torch.randn(3)
    module = text("aten::addcmul", x, x, x)
    assert module.count("func.func private") == 1
    assert module.count("call @shift") == 2
    text("aten::addcmul", x, x, x)
    assert traces == 1
    jax_trace.cache_clear()


def test_jax_rules_do_not_depend_on_how_the_user_has_set_jax() -> None:
    import jax

    @use_jax("aten::addcmul")
    def rule(x: Any, y: Any, z: Any, value: Any) -> Any:
        import jax.numpy as jnp

        assert jax.random.key_data(jax.random.key(0)).shape == (2,)
        once = jax.lax.while_loop(lambda n: n < 1, lambda n: n + 1, jnp.int32(0))
        return x @ jnp.eye(3) + value * y * z * once

    x = torch.randn(3)
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        jax.default_prng_impl("rbg"),
        jax.default_matmul_precision("highest"),
        jax.disable_jit(),
    ):
        check("aten::addcmul", x, x, torch.randn(2, 3))
        assert "HIGHEST" not in text("aten::addcmul", x, x, torch.randn(2, 3))
    jax_trace.cache_clear()


def test_jax_opens_no_device_and_keeps_its_settings() -> None:
    script = """
import torch
from lazyxla.lowering import *
@jax_rule("test::op")
def op(x):
    import jax.numpy as jnp
    return jnp.cumsum(x * jnp.arange(3))
spec = TensorSpec(torch.float32, (3,))
lower(Program([spec], [Node("test::op", (Ref(0),), (spec,))], [Ref(1)], [], {}), "tpu", verify=True)
import jax
from jax._src import xla_bridge
print(jax.config.jax_platforms, jax.config.jax_enable_x64, xla_bridge.backends_are_initialized())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.split() == ["None", "False", "False"], result.stderr


def test_decomposition() -> None:
    use_decomposition("aten::addcmul", "aten::huber_loss")
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    check("aten::addcmul", x, y, y, value=0.5)
    check("aten::huber_loss", x, y, 1, 0.7)


def test_decomposition_that_mutates_is_made_functional() -> None:
    use_decomposition("aten::index_add")
    check("aten::index_add", torch.randn(4, 3), 0, torch.tensor([1, 3]), torch.randn(2, 3))


def test_decomposition_into_prims() -> None:
    use_decomposition("aten::var.correction", "aten::roll", "aten::native_layer_norm")
    x = torch.randn(3, 4)
    check("aten::var.correction", x, [1])
    check("aten::roll", x, [1], [0])
    check("aten::native_layer_norm", x, [4], torch.randn(4), torch.randn(4), 1e-5)


def test_decomposition_makes_its_numbers_static() -> None:
    use_decomposition("aten::addcmul")
    from lazyxla.lowering import lower

    x = torch.randn(3)
    recorded = record("aten::addcmul", x, x, x, value=0.5)
    assert lower(recorded.program, "cpu").static_slots == (0,)


def test_random_operators_of_one_decomposition_have_seeds_of_their_own() -> None:
    """None is the seed of another, nor of one in a call whose seed is near."""

    @registry.rule("aten::rand_like", "aten::uniform")
    def uniform(b: Any, x: Any, *_: Any) -> Any:
        return b.full(
            b.shape(x), b.hlo.bitcast_convert(b.type(torch.float64), b.rng[0]), b.dtype(x)
        )

    def three(b: Any, x: Any, *_: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        from lazyxla.lowering.fx_graph import FxGraph, run_graph

        graph = make_fx(
            lambda t: torch.cat([torch.rand_like(t[:1]) for _ in range(3)]), tracing_mode="fake"
        )(torch.zeros(3, dtype=torch.float64))
        return run_graph(b, FxGraph.of(graph.graph), [x])

    registry.rule("aten::normal_functional")(three)
    seeds = [
        seed
        for near in range(4)
        for result in run("aten::normal_functional", torch.zeros(3).double(), seed=near)
        for seed in result.view(torch.int64).tolist()
    ]
    assert len(seeds) == 12
    assert len(set(seeds)) == 12


def test_error_names_the_operator_and_its_decomposition() -> None:
    use_decomposition("aten::addcmul", "aten::mul.Tensor", "prims::mul")
    registry._graph_rules.pop("prims::mul", None)
    x = torch.randn(3)
    program = record("aten::addcmul", x, x, x).program
    with pytest.raises(LoweringError, match=r"aten::addcmul .*decomposition.*prims::mul\(float32"):
        lower(program, "cuda")
    # There the program can call PyTorch's kernel.
    assert 'operator = "aten::mul.Tensor"' in lower_to_text(program, "cpu")


GRAPH_CASES: list[tuple[str, tuple[Any, ...]]] = [
    ("aten::permute", ([1, 0],)),
    ("aten::transpose.int", (0, 1)),
    ("aten::t", ()),
    ("aten::view", ([2, 6],)),
    ("aten::expand", ([5, 3, 4],)),
    ("aten::slice.Tensor", (1, 1, 4, 2)),
    ("aten::select.int", (1, 2)),
    ("aten::unsqueeze", (-1,)),
    ("aten::squeeze.dim", (0,)),
    ("aten::split.Tensor", (2, 1)),
    ("aten::split_with_sizes", ([1, 3], 1)),
    ("aten::unbind.int", (0,)),
    ("aten::diagonal", (1,)),
    ("aten::unfold", (1, 2, 1)),
    ("aten::as_strided", ([2, 2], [1, 3], 1)),
    ("aten::alias", ()),
    ("aten::detach", ()),
    ("aten::clone", ()),
    ("aten::lift_fresh_copy", ()),
    ("aten::slice_copy.Tensor", (0, 1, 3)),
    ("aten::slice_scatter", (torch.zeros(3, 2), 1, 1, 4, 2)),
    ("aten::select_scatter", (torch.zeros(3), 1, 2)),
    ("aten::diagonal_scatter", (torch.zeros(3), 0)),
    ("aten::as_strided_scatter", (torch.zeros(2, 2), [2, 2], [1, 3], 1)),
    ("aten::copy", (torch.zeros(4, dtype=torch.int32),)),
]


@pytest.mark.parametrize(("name", "args"), GRAPH_CASES, ids=[c[0] for c in GRAPH_CASES])
def test_graph_rules(name: str, args: tuple[Any, ...]) -> None:
    check(name, torch.randn(3, 4), *args)


def test_graph_rule_of_a_cast() -> None:
    check("aten::_to_copy", torch.randn(3, 4), dtype=torch.int32)
