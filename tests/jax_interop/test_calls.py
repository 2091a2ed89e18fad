"""JAX's functions on tensors: values and derivatives as PyTorch's on the CPU, in the program."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor

import lazyxla
from tests.conftest import RunPython

DEVICE = "lazyxla"


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1) * 3


clipped.defvjp(lambda x: (clipped(x), None), lambda _, g: (g * 3,))


class ClippedOnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clip(-1, 1) * 3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


# By name: JAX's function, PyTorch's, shapes of the arguments.
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "pointwise": (lambda x: jnp.sin(x) ** 3, lambda x: x.sin() ** 3, [(3, 4)]),
    "product": (lambda x, y: jnp.tanh(x) @ y, lambda x, y: x.tanh() @ y, [(3, 4), (4, 2)]),
    "several": (
        lambda x, y: (x * y, jnp.exp(y).sum()),
        lambda x, y: (x * y, y.exp().sum()),
        [(3,), (3,)],
    ),
    "scan": (
        lambda x: jax.lax.scan(lambda c, row: (c * jnp.cos(row), c + row), x[0], x)[1],
        lambda x: _scan(x),
        [(4, 3)],
    ),
    "with an index": (
        lambda x: (jnp.argmax(x, 0).astype(jnp.int32), x.max(0)),
        lambda x: (x.argmax(0).int(), x.amax(0)),
        [(4, 3)],
    ),
    "does not use all": (lambda x, y: x * 2, lambda x, y: x * 2, [(2,), (5,)]),
}


def _scan(x: Tensor) -> Tensor:
    carry, rows = x[0], []
    for row in x:
        rows.append(carry + row)
        carry = carry * row.cos()
    return torch.stack(rows)


def on_both(case: str) -> tuple[Any, Any, list[Tensor], list[Tensor]]:
    ours, theirs, shapes = CASES[case]
    inputs = [torch.randn(shape) / 4 for shape in shapes]
    return lazyxla.jax_function(ours), theirs, [x.to(DEVICE) for x in inputs], inputs


def compare(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(torch.utils._pytree.tree_map(lambda x: x.cpu(), ours), theirs)


def loss(function: Any) -> Callable[..., Tensor]:
    """The sum of what has gradients, such that each has another one."""

    def of(*inputs: Tensor) -> Tensor:
        results = torch.utils._pytree.tree_leaves(function(*inputs))
        known = [x for x in results if x.is_floating_point()]
        return sum(((x * (n + 2)).square().sum() for n, x in enumerate(known)), torch.tensor(0.0))

    return of


def gradients(function: Any, inputs: list[Tensor]) -> Any:
    leaves = [x.clone().requires_grad_() for x in inputs]
    total = loss(function)(*(x * 1 for x in leaves))
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str) -> None:
    f, g, ours, theirs = on_both(case)
    compare(f(*ours), g(*theirs))
    compare(gradients(f, ours), gradients(g, theirs))


@pytest.mark.parametrize("case", ["pointwise", "product", "several"])
def test_further_derivatives(case: str) -> None:
    f, g, ours, theirs = on_both(case)
    numbers = tuple(range(len(ours)))
    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd, torch.func.jacrev):
        compare(transform(loss(f), numbers)(*ours), transform(loss(g), numbers)(*theirs))
    with torch.autograd.forward_ad.dual_level():
        tangents = [torch.randn(x.shape) for x in theirs]
        duals = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(theirs, tangents)]
        expected = torch.autograd.forward_ad.unpack_dual(loss(g)(*duals)).tangent
        duals = [
            torch.autograd.forward_ad.make_dual(x, t.to(DEVICE)) for x, t in zip(ours, tangents)
        ]
        compare(torch.autograd.forward_ad.unpack_dual(loss(f)(*duals)).tangent, expected)


@pytest.mark.parametrize("case", ["pointwise", "product", "several", "scan"])
def test_vmap(case: str) -> None:
    f, g, ours, _ = on_both(case)
    batches = [torch.randn(5, *x.shape) / 4 for x in ours]
    moved = [x.movedim(0, -1).to(DEVICE) for x in batches]
    axes = tuple(-1 for _ in moved)
    compare(torch.func.vmap(f, axes)(*moved), torch.func.vmap(g)(*batches))
    each = torch.func.vmap(torch.func.grad(loss(f)), axes)(*moved)
    compare(each, torch.func.vmap(torch.func.grad(loss(g)))(*batches))
    first = [-1, *[None] * (len(moved) - 1)]
    rest = [x[0] for x in batches[1:]]
    ours_first = torch.func.vmap(f, tuple(first))(moved[0], *(x.to(DEVICE) for x in rest))
    compare(ours_first, torch.func.vmap(g, (0, *first[1:]))(batches[0], *rest))


def test_gradients_of_gradients_through_autograd() -> None:
    f, g, ours, theirs = on_both("product")
    for function, inputs in ((f, ours), (g, theirs)):
        x, y = (t.requires_grad_() for t in inputs)
        (first,) = torch.autograd.grad(function(x, y).sum(), x, create_graph=True)
        first.square().sum().backward()
    compare([ours[0].grad, ours[1].grad], [theirs[0].grad, theirs[1].grad])


def test_what_the_backward_does_not_need_may_be_written_to() -> None:
    square = lazyxla.jax_function(lambda x, y: x * x + y)
    x = torch.rand(3, device=DEVICE, requires_grad=True)
    y = torch.rand(3, device=DEVICE)
    total = square(x, y).sum()
    y.add_(1)
    (gradient,) = torch.autograd.grad(total, x)
    compare(gradient, 2 * x.detach().cpu())
    total = square(x, y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match=r"argument 1 .* modified by an inplace operation"):
        torch.autograd.grad(total, x, create_graph=True)
    total = square(x, y).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_a_gradient_of_its_own() -> None:
    x = torch.randn(8)
    ours = gradients(lazyxla.jax_function(clipped), [x.to(DEVICE)])
    compare(ours, gradients(ClippedOnCpu.apply, [x]))


def test_complex_gradients() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    ours, theirs = x.to(DEVICE).requires_grad_(), x.clone().requires_grad_()
    square = lazyxla.jax_function(lambda z: jnp.abs(z * z * (1 + 2j)) ** 2)
    square(ours).sum().backward()
    ((theirs * theirs * (1 + 2j)).abs() ** 2).sum().backward()
    compare(ours.grad, theirs.grad)


@pytest.mark.parametrize("mode", ["lazy", "eager", "region", "torch.compile"])
def test_training_is_one_program_per_step(mode: str) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4).to(DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gelu = lazyxla.jax_function(jax.nn.gelu)
    x = torch.randn(8, 4, device=DEVICE)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = gelu(layer(x), approximate=True).square().mean()
        value.backward()
        optimizer.step()
        return value.detach()

    run: Any = {
        "region": lambda: lazyxla.compile(step),
        "torch.compile": lambda: torch.compile(step, backend="lazyxla"),
    }.get(mode, lambda: step)()
    losses = []
    with lazyxla.eager_mode(mode == "eager"):
        for number in range(6):
            if number == 3:
                lazyxla.sync(wait=True)
                before = lazyxla.counters()
            losses.append(run())
            lazyxla.sync(wait=True)
    after = lazyxla.counters()
    assert after["compiles"] == before["compiles"]
    assert after["fallbacks"] == before["fallbacks"]
    if mode != "eager":
        assert after["executions"] - before["executions"] == 3

    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    y, expected = x.cpu(), []
    for _ in range(6):
        optimizer.zero_grad()
        value = torch.nn.functional.gelu(layer(y), approximate="tanh").square().mean()
        value.backward()
        optimizer.step()
        expected.append(value.detach())
    compare(losses, expected)


@pytest.mark.parametrize("backend", ["lazyxla", "aot_eager"])
def test_in_a_whole_graph_of_torch_compile(backend: str) -> None:
    traced = []

    @lazyxla.jax_function
    def scaled(tree: Any, *, by: float) -> Any:
        traced.append(by)
        return {"sine": jnp.sin(tree["x"]) * by, "sum": tree["y"].sum()}

    def function(x: Tensor, y: Tensor) -> Tensor:
        results = scaled({"x": x * 2, "y": y}, by=3.0)
        return (results["sine"] + 1) * results["sum"]

    ours = torch.compile(function, backend=backend, fullgraph=True)
    inputs = [torch.rand(4) for _ in range(2)]
    here = [x.to(DEVICE).requires_grad_() for x in inputs]
    there = [x.requires_grad_() for x in inputs]
    for _ in range(3):
        ours(*here).sum().backward()
        lazyxla.sync(wait=True)
        x, y = there
        (((x * 2).sin() * 3 + 1) * y.sum()).sum().backward()
    compare([x.grad for x in here], [x.grad for x in there])
    assert traced == [3.0]


def test_trees_and_constants() -> None:
    calls = []

    def function(tree: Any, factor: float, *, axis: int, names: tuple[str, ...]) -> Any:
        calls.append((factor, axis, names))
        return {name: (tree["x"] * factor).sum(axis) + tree["y"][0] for name in names}, None

    x, y = torch.randn(2, 3), torch.randn(3)
    tree = {"x": x.to(DEVICE), "y": (y.to(DEVICE),)}
    with torch.no_grad():
        for _ in range(3):
            got, nothing = lazyxla.call_jax(function, tree, 2.0, axis=0, names=("a", "b"))
        assert nothing is None
        compare(got, {name: (x * 2).sum(0) + y for name in "ab"})
        lazyxla.call_jax(function, tree, 2, axis=0, names=("a",))  # 2 is not 2.0
    assert calls == [(2.0, 0, ("a", "b")), (2, 0, ("a",))]


def test_zero_and_minus_zero_are_two_constants() -> None:
    scale = lazyxla.jax_function(lambda x, by: x * by)
    x = torch.ones(2, device=DEVICE)
    for by in (0.0, -0.0, np.float32(0.0), np.float32(-0.0), complex(0.0, -0.0)):
        compare(torch.view_as_real(scale(x, by) + 0j), torch.view_as_real(x.cpu() * by + 0j))
        assert scale(x, by).real.signbit().tolist() == [math.copysign(1, by.real) < 0] * 2


def test_without_tensors() -> None:
    assert lazyxla.call_jax(jnp.arange, 4).tolist() == [0, 1, 2, 3]


def test_dtypes_as_jax_is_set() -> None:
    index = torch.tensor([2, 0], device=DEVICE)
    rows = torch.randn(3, 2, device=DEVICE)
    compare(lazyxla.call_jax(lambda x, i: x[i], rows, index), rows.cpu()[index.cpu()])
    double = lazyxla.jax_function(lambda x: x * 2)
    assert double(index).dtype == torch.int32
    with pytest.raises(TypeError, match="jax_enable_x64"):
        double(rows.double())
    with jax.enable_x64(True):
        assert double(index).dtype == torch.int64
        compare(double(rows.double()), rows.cpu().double() * 2)
    compare(double(rows.bfloat16()), rows.cpu().bfloat16() * 2)


def test_precision_and_kind_of_keys_as_jax_is_set() -> None:
    square = lazyxla.jax_function(lambda x: x @ x)
    data = lazyxla.jax_function(lambda x: jax.random.key_data(jax.random.key(0)))
    x = torch.ones(2, 2, device=DEVICE)
    assert "HIGHEST" not in lazyxla.stablehlo(square, x)
    assert data(x).shape == (2,)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in lazyxla.stablehlo(square, x)
    with jax.default_prng_impl("rbg"):
        assert data(x).shape == (4,)
    assert "HIGHEST" not in lazyxla.stablehlo(square, x)


def test_promotion_and_random_numbers_as_jax_is_set() -> None:
    add = lazyxla.jax_function(lambda x, y: x + y)
    draw = lazyxla.jax_function(lambda data: jax.random.bits(jax.random.wrap_key_data(data), (4,)))
    x, n = torch.ones(2, device=DEVICE), torch.ones(2, 2, dtype=torch.int32, device=DEVICE)
    data = torch.tensor([0, 7], dtype=torch.uint32, device=DEVICE)
    compare(add(x, n), torch.full((2, 2), 2.0))
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="promotion"):
        add(x, n)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="broadcast"):
        add(x, n)
    drawn = draw(data)
    with jax.threefry_partitionable(False):
        assert not draw(data).equal(drawn)
    with jax.disable_jit():
        compare(add(n, n), torch.full((2, 2), 2, dtype=torch.int32))


def test_random_numbers() -> None:
    normal = lazyxla.jax_function(lambda key: jax.random.normal(key, (1000,)))
    draws = []
    for seed in (0, 0, 1):
        lazyxla.manual_seed(seed)
        draws.append(normal(lazyxla.jax_key()).cpu())
    assert draws[0].equal(draws[1])
    assert not draws[0].equal(draws[2])
    assert abs(draws[0].mean()) < 0.2
    assert abs(draws[0].std() - 1) < 0.2


def test_refused() -> None:
    double = lazyxla.jax_function(lambda x, *_: x * 2)
    x = torch.ones(2, device=DEVICE)
    with pytest.raises(TypeError, match=r'of the device "lazyxla", got one on cpu'):
        double(torch.ones(2))
    with pytest.raises(ValueError, match="lazyxla:0, lazyxla:1"):
        double(x, torch.ones(2, device="lazyxla:1"))
    with pytest.raises(TypeError, match="ndarray, which is not hashable"):
        double(x, x.cpu().numpy())
    with pytest.raises(TypeError, match="key_data"):
        lazyxla.call_jax(jax.random.wrap_key_data, lazyxla.jax_key())
    with pytest.raises(TypeError, match="incompatible shapes"):
        lazyxla.call_jax(jnp.add, x, torch.ones(3, device=DEVICE))
    compare(double(x), torch.full((2,), 2.0))
    with pytest.raises(TypeError, match=r'of the device "lazyxla", got one on cpu'):
        double(torch.ones(2))  # traced for these types by now


TWICE = """
import torch, lazyxla, jax, jax.numpy as jnp
function = lazyxla.jax_function(lambda x, y: (jnp.sin(x) @ y).sum())
x = torch.ones(3, 4, device="lazyxla", requires_grad=True)
function(x, torch.ones(4, 5, device="lazyxla")).backward()
assert x.grad.shape == x.shape and x.grad.isfinite().all()
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized() and jax.config.jax_platforms is None
print(lazyxla.counters()["compiles"])
"""


def test_another_process_finds_the_program_and_jax_opens_nothing(
    run_python: RunPython, tmp_path: Any
) -> None:
    environment = {"LAZYXLA_CACHE_DIR": str(tmp_path), "LAZYXLA_CACHE_SIZE": "1000000000"}
    assert int(run_python(TWICE, **environment).stdout) > 0
    assert int(run_python(TWICE, **environment).stdout) == 0
