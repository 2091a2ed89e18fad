"""PyTorch's modules and functions in JAX: values and derivatives as PyTorch's on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import lazyxla
from lazyxla.lowering import LoweringError
from tests.conftest import RunPython
from tests.jax_interop.exporting import arrays

jax.config.update("jax_platforms", "cpu")

pytestmark = pytest.mark.usefixtures("fresh_dynamo")  # which PyTorch's control flow takes


def compare(ours: Any, theirs: Any) -> None:
    """Trees of JAX arrays and of tensors."""
    listed, expected = jax.tree.leaves(ours), torch.utils._pytree.tree_leaves(theirs)
    for a, b in zip(listed, expected, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(lazyxla.from_jax(a).cpu(), b.detach())
        else:
            assert a == b


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, self.mask)
        places = torch.arange(x.shape[1]) / 10  # on the device, without being told
        return self.out(mixed.transpose(1, 2).flatten(2)) + places[:, None]


def in_place(x: Tensor) -> Tensor:
    y = torch.zeros(4, x.shape[1], device=x.device)
    y[:3] = x
    y[1].mul_(2)
    y.view(-1)[::2] += 1
    return y.sin_()


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda a: a.tanh() * 2, lambda a: a.sin(), (x,))


def flex(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the advice to compile it
        return flex_attention(x, x, x, score_mod=lambda s, b, h, q, k: s + (q - k) * 0.1)


# By name: a function or module, the shapes of its arguments.
CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "pointwise": (lambda x, y: (x.sin() * y, y.exp().sum()), [(3, 4), (3, 4)]),
    "product": (lambda x, y: x.tanh() @ y, [(3, 4), (4, 2)]),
    "in place": (in_place, [(3, 4)]),
    "indexing": (lambda x: x[:, [2, 0]].softmax(0) + x.argmax(), [(3, 4)]),
    "sorted": (lambda x: (x.sort(1).values.cumsum(0), x.topk(2).indices), [(3, 4)]),
    "linalg": (lambda x: torch.linalg.inv(x @ x.T + torch.eye(3)), [(3, 3)]),
    "branches": (branches, [(3, 4)]),
    "mlp": (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), [(5, 4)]),
    "convolution": (
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2)
        ),
        [(2, 2, 6, 6)],
    ),
    "attention": (Attention(), [(2, 5, 8)]),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), [(2, 5, 8)]),
    "lstm": (nn.LSTM(4, 3, batch_first=True), [(2, 5, 4)]),
}


def both(name: str) -> tuple[Callable[..., Any], Callable[..., Any], list[np.ndarray]]:
    """A function of JAX's, PyTorch's of the same arguments, and the arguments: of a module its
    parameters first, by their order."""
    function, shapes = CASES[name]
    inputs = arrays(*shapes)
    view = lazyxla.jax_view(function)
    if not isinstance(function, nn.Module):
        return view, function, inputs
    names = [name for name, _ in function.named_parameters()]
    count = len(names)

    def ours(*given: Any) -> Any:
        return view(dict(zip(names, given[:count], strict=True)), *given[count:])

    def theirs(*given: Tensor) -> Any:
        state = dict(zip(names, given[:count], strict=True))
        return torch.func.functional_call(function, state, given[count:])

    state = [np.array(view.parameters[name]) for name in names]
    return ours, theirs, [*state, *inputs]


def tensors(given: list[np.ndarray], requires_grad: bool = False) -> list[Tensor]:
    return [torch.tensor(x, requires_grad=requires_grad) for x in given]


def loss_of(function: Callable[..., Any], sin: Any, tree_leaves: Any) -> Callable[..., Any]:
    """The sum of what has gradients, such that each has another one."""

    def loss(*args: Any) -> Any:
        found = [x for x in tree_leaves(function(*args)) if "float" in str(x.dtype)]
        return sum((sin(x) * (i + 1)).sum() for i, x in enumerate(found))

    return loss


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, jit: bool) -> None:
    ours, theirs, given = both(name)
    compare((jax.jit(ours) if jit else ours)(*given), narrow(theirs(*tensors(given))))
    loss = loss_of(ours, jnp.sin, jax.tree.leaves)
    expected = loss_of(theirs, torch.sin, torch.utils._pytree.tree_leaves)
    places = tuple(range(len(given)))
    gradients = jax.grad(loss, places)
    inputs = tensors(given, requires_grad=True)
    expected(*inputs).backward()
    compare((jax.jit(gradients) if jit else gradients)(*given), [x.grad for x in inputs])


def narrow(results: Any) -> Any:
    """As JAX has them by default."""
    return torch.utils._pytree.tree_map(
        lambda x: x.int() if x.dtype == torch.int64 else x.detach(), results
    )


def test_of_any_order() -> None:
    ours, theirs, given = both("mlp")
    loss = loss_of(ours, jnp.sin, jax.tree.leaves)
    expected = loss_of(theirs, torch.sin, torch.utils._pytree.tree_leaves)
    x = len(given) - 1
    inputs = tensors(given)
    compare(jax.hessian(loss, x)(*given), torch.func.hessian(expected, x)(*inputs))
    moved = jnp.ones_like(given[x])
    compare(
        jax.jvp(lambda v: loss(*given[:x], v), (given[x],), (moved,)),
        torch.func.jvp(lambda v: expected(*inputs[:x], v), (inputs[x],), (torch.ones(5, 4),)),
    )
    third = jax.grad(
        lambda v: jax.grad(lambda w: jax.grad(lambda u: loss(*given[:x], u))(w).sum())(v).sum()
    )
    theirs_third = torch.func.grad(
        lambda v: torch.func.grad(
            lambda w: torch.func.grad(lambda u: expected(*inputs[:x], u))(w).sum()
        )(v).sum()
    )
    compare(third(given[x]), theirs_third(inputs[x]))


def test_flex_attention(fresh_dynamo: None) -> None:
    (x,) = arrays((1, 2, 16, 8))
    compare(jax.jit(lazyxla.jax_view(flex))(x), flex(torch.tensor(x)))


def test_inference_mode_stays_outside() -> None:
    with torch.inference_mode():
        gradient = jax.grad(lambda x: lazyxla.jax_view(torch.sin)(x).sum())(jnp.ones(2))
    compare(gradient, torch.ones(2).cos())


# ---- modules ----


def test_buffers_come_back() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 2))
    (x,) = arrays((4, 2, 6, 6))
    view = lazyxla.jax_view(model)
    parameters, buffers = view.parameters, view.buffers
    assert buffers["1.num_batches_tracked"].dtype == jnp.int32
    step = jax.jit(lambda p, b, x: view(p, x, buffers=b))
    for _ in range(3):
        ours, buffers = step(parameters, buffers, x)
    untouched = dict(model.named_buffers())
    assert int(untouched["1.num_batches_tracked"]) == 0
    with pytest.raises(ValueError, match=r"'1.running_mean', '1.running_var'\. Give it buffers"):
        view(parameters, x)
    for _ in range(3):
        theirs = model(torch.tensor(x))
    compare(ours, theirs)
    compare(buffers, narrow(dict(sorted(model.named_buffers()))))
    model.eval()  # which counts, as does the state that the module has now
    compare(view(parameters, x), model(torch.tensor(x)))


def test_a_buffer_that_counts_is_not_lost() -> None:
    """Also where JAX has it in fewer bits."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    view = lazyxla.jax_view(Counts())
    with pytest.raises(ValueError, match="buffer 'calls'"):
        view({}, jnp.ones(2))
    x, buffers = view({}, jnp.ones(2), buffers={"calls": jnp.int32(4)})
    assert (x.tolist(), int(buffers["calls"])) == ([5, 5], 5)


def test_training_as_pytorch_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 7))
    tokens = torch.randint(7, (5, 4))
    view = lazyxla.jax_view(model)
    with_loss = lazyxla.jax_view(lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten().long()))
    parameters = view.parameters
    given = lazyxla.to_jax(tokens)
    assert given.dtype == jnp.int32

    @jax.jit
    def step(parameters: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: with_loss(view(p, given), given))(parameters)
        return loss, jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradients)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(5):
        loss, parameters = step(parameters)
        expected = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        compare(loss, expected)
    compare([parameters[name] for name, _ in model.named_parameters()], list(model.parameters()))
    assert step._cache_size() == 1


def test_a_gradient_is_that_of_the_forward_whatever_changed_since() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.zeros(()).dtype == torch.float32
            return (x * (2 if self.training else 5)) @ torch.ones(3, 1)

    module = Doubled()
    view = lazyxla.jax_view(module)
    with torch.autocast("lazyxla", torch.bfloat16):
        result, pull = jax.vjp(lambda x: view({}, x), jnp.ones((1, 3)))
    assert result.dtype == jnp.bfloat16
    module.eval()
    torch.set_default_dtype(torch.float64)
    try:
        (gradient,) = pull(jnp.full((1, 1), 1 + 2**-10, jnp.bfloat16))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert gradient.tolist() == [[2, 2, 2]]
    assert not module.training


def test_random_numbers_come_of_the_key() -> None:
    view = lazyxla.jax_view(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    x = jnp.ones(1000)
    first, again = (view({}, x, key=jax.random.key(1)) for _ in range(2))
    assert (first == again).all()
    assert (first != view({}, x, key=jax.random.key(2))).any()
    assert (first == view({}, x, key=jax.random.PRNGKey(1))).all()
    view({}, x, key=jax.random.key(1, impl="rbg"))
    kept = float((first != 0).mean())
    assert 0.2 < kept < 0.3  # the two drop others
    # The backward draws the same.
    compare(
        jax.grad(lambda v: view({}, v, key=jax.random.key(1)).sum())(x),
        torch.tensor(np.array(first)),
    )
    rows = jax.vmap(lambda v: view({}, v, key=jax.random.key(1)))(jnp.ones((3, 1000)))
    assert (rows == first).all()
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.vmap(lambda key: view({}, x, key=key))(keys)
    for row, key in zip(rows, keys, strict=True):
        assert (row == view({}, x, key=key)).all()
    with pytest.raises(ValueError, match="random numbers: give it key"):
        view({}, x)


def test_types_that_jax_is_set_to() -> None:
    def compute(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.double() * 2, x.argmax()

    x = jnp.arange(3.0)
    narrow_one, position = lazyxla.jax_view(compute)(x)
    assert (narrow_one.dtype, position.dtype) == (jnp.float32, jnp.int32)
    with jax.enable_x64(True):
        wide, position = lazyxla.jax_view(compute)(x)
        assert (wide.dtype, position.dtype) == (jnp.float64, jnp.int64)


def test_trees_and_constants() -> None:
    def compute(pair: Any, *, power: int, name: str) -> Any:
        return {"sum": pair["a"] + pair["b"][0] ** power, "name": name, "none": None}

    view = lazyxla.jax_view(compute)
    given = {"a": jnp.ones(2), "b": [np.full(2, 3, np.float32)]}
    found = view(given, power=2, name="x")
    assert found["name"] == "x"
    assert found["none"] is None
    assert found["sum"].tolist() == [10, 10]
    assert view(given, power=3, name="x")["sum"].tolist() == [28, 28]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lazyxla.jax_view(3), TypeError, "expected a module or a function"),
        (lambda: lazyxla.jax_view(nn.ReLU())(jnp.ones(2)), TypeError, "parameters first"),
        (lambda: lazyxla.jax_view(nn.Linear(2, 2))({}, 0), ValueError, "missing bias, weight"),
        (lambda: lazyxla.jax_view(nn.ReLU())({"w": 1}, 0), ValueError, "unknown w"),
        (lambda: lazyxla.jax_view(torch.sin)(torch.ones(2)), TypeError, "to_jax"),
        (lambda: lazyxla.jax_view(torch.sin)(set()), TypeError, "a set, which is no array"),
        (lambda: lazyxla.jax_view(torch.sin)(jnp.ones(2), buffers={}), TypeError, "no buffers"),
        (
            lambda: lazyxla.jax_view(Tensor.add_)(jnp.ones(2), 1),
            ValueError,
            "write to its arguments, as this does: argument 0",
        ),
        (lambda: lazyxla.jax_view(Tensor.nonzero)(jnp.ones(2)), LoweringError, "aten::nonzero"),
        (
            lambda: lazyxla.jax_view(lambda x: x * x[0].item())(jnp.ones(2)),
            LoweringError,
            "reads a",
        ),
        (
            lambda: lazyxla.jax_view(lambda x: x if x.sum() else -x)(jnp.ones(2)),
            LoweringError,
            "reads",
        ),
        (
            lambda: lazyxla.jax_view(lambda x: x[x > 0])(jnp.ones(2)),
            LoweringError,
            "the shape of what",
        ),
        (lambda: lazyxla.jax_view(nn.Dropout())({}, jnp.ones(2), key=3), TypeError, "a key of jax"),
    ],
)
def test_bad_input(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_only_the_host_can_run_is_named() -> None:
    with pytest.raises(LoweringError, match=r"aten::hash_tensor.*no rule"):
        lazyxla.jax_view(torch.hash_tensor)(jnp.ones((2, 2)))


def test_parameters_spread_over_devices(run_python: RunPython) -> None:
    """XLA's partitioner goes through it; so does `shard_map`."""
    code = """
import jax, jax.numpy as jnp, numpy as np, torch, lazyxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
view = lazyxla.jax_view(model)
x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
loss = lambda p, x: (view(p, x) ** 2).mean()
expected = jax.value_and_grad(loss)(view.parameters, x)
split = NamedSharding(mesh, P("x"))
parameters = jax.tree.map(lambda a: jax.device_put(a, split), view.parameters)
ours = jax.jit(jax.value_and_grad(loss))(parameters, jax.device_put(x, split))
close = lambda *both: torch.testing.assert_close(*(torch.from_numpy(np.array(x)) for x in both))
jax.tree.map(close, ours, expected)
mapped = jax.shard_map(view, mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
whole = view(view.parameters, x)
close(mapped(view.parameters, x), whole)
print(len(jax.devices()))
"""
    flags = "--xla_force_host_platform_device_count=4"
    assert run_python(code, JAX_PLATFORMS="cpu", XLA_FLAGS=flags).stdout.split() == ["4"]
