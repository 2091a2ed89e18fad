"""Meshes, sharding and reading it, and that values, views and writes do not notice."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from helpers import OWN_DEVICES, bytes_on_devices, grid, one_process, sharded, spec_of
from models import MESH
from torch.distributed import DeviceMesh
from torch.utils._pytree import tree_map

import lazyxla
from lazyxla import _C
from tests.support import DEVICE, counted

# ---- meshes and specs ----


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lazyxla.Mesh((4,), ("a", "b")), ValueError, "needs a name for each axis"),
        (lambda: lazyxla.Mesh((2, 2), ("a", "a")), ValueError, "different names"),
        (lambda: lazyxla.Mesh((2,), ("a b",)), ValueError, "must be an identifier"),
        (lambda: lazyxla.Mesh((2,), "a"), TypeError, "sequence of strings"),
        (lambda: lazyxla.Mesh((0,), ("a",)), ValueError, "at least one device"),
        (lambda: lazyxla.Mesh((16,), ("a",)), ValueError, "needs 16 devices, and there are 8"),
        (lambda: lazyxla.Mesh((2,), ("a",), [0, 8]), (IndexError, RuntimeError), "8"),
        (lambda: lazyxla.Mesh((2,), ("a",), [0]), ValueError, "needs 2 devices, got 1"),
        (lambda: lazyxla.Mesh((2,), ("a",), [3, 3]), ValueError, "only once"),
    ],
)
def test_wrong_meshes(make: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def device_mesh(
    ranks: Any, names: tuple[str, ...] | None = ("data", "model"), device: str = "lazyxla"
) -> DeviceMesh:
    """As a single process makes one: without a process group."""
    return DeviceMesh(device, ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def test_a_mesh_of_a_device_mesh() -> None:
    mesh = lazyxla.Mesh.from_device_mesh(device_mesh([[3, 1], [0, 2], [5, 4]]))
    assert mesh == lazyxla.Mesh((3, 2), ("data", "model"), [3, 1, 0, 2, 5, 4])
    x = grid(6, 4)
    y = sharded(x, "data", "model", mesh=mesh)
    assert spec_of(y) == ("data", "model")
    assert torch.equal(y.cpu(), x)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: device_mesh([[0, 1]], None), ValueError, "needs mesh_dim_names"),
        (lambda: device_mesh([[0, 1]], device="cpu"), ValueError, "got one on 'cpu'"),
        (lambda: device_mesh([[0, 8]]), IndexError, "there are 8 devices"),
        (lambda: MESH, TypeError, "expected a DeviceMesh, got Mesh"),
    ],
)
def test_wrong_device_meshes(make: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        lazyxla.Mesh.from_device_mesh(make())


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (("data", "data"), ValueError, "along an axis twice"),
        ((("data", "data"),), ValueError, "along an axis twice"),
        (("rows",), ValueError, "names the axis 'rows', and the mesh has"),
        ((None, None, "data"), ValueError, "has 3 entries, and the tensor 2 dimensions"),
        ("data", TypeError, "a tuple with an entry for each dimension"),
    ],
)
def test_wrong_specs(spec: Any, error: type[Exception], message: str) -> None:
    x = torch.ones(4, 4, device=DEVICE)
    with pytest.raises(error, match=message):
        lazyxla.shard(x, MESH, spec)
    with pytest.raises(error, match=message):
        lazyxla.constrain(x, MESH, spec)
    assert lazyxla.sharding(x) is None


def test_what_cannot_be_sharded() -> None:
    with pytest.raises(ValueError, match="view of a part of its memory"):
        lazyxla.shard(torch.ones(4, 4, device=DEVICE)[1:], MESH, ("data",))
    with pytest.raises(ValueError, match="a tensor on cpu cannot be sharded"):
        lazyxla.constrain(torch.ones(4), MESH, ("data",))
    with pytest.raises(TypeError, match="a tensor or a module"):
        lazyxla.shard([1], MESH, ())  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"expected a lazyxla\.Mesh"):
        lazyxla.shard(torch.ones(4, device=DEVICE), (4, 2), ())  # type: ignore[arg-type]


@one_process
def test_meshes_are_the_same_by_what_they_say() -> None:
    same = lazyxla.Mesh((4, 2), ("data", "model"), devices=[f"{DEVICE}:{i}" for i in range(8)])
    assert same == MESH
    assert hash(same) == hash(MESH)
    assert lazyxla.Mesh((2, 4), ("data", "model")) != MESH
    assert (MESH.size, MESH.axis_size("model")) == (8, 2)
    assert repr(lazyxla.Mesh((2,), ("x",), [5, 3])) == "Mesh(x=2; devices [5, 3])"


# ---- where the data lies ----


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        (("data", "model"), 8 * 6 // 8),
        (("model", "data"), (8 // 2) * 2),
        ((("data", "model"),), 8 * 6 // 8),
        ((("model", "data"), None), 8 * 6 // 8),
        ((None, "model"), 8 * 6 // 2),
        ((), 8 * 6),
    ],
)
def test_each_device_gets_its_part(spec: Any, part: int) -> None:
    x = grid(8, 6)
    d = torch.empty(8, 6, device=DEVICE)
    before = bytes_on_devices()
    lazyxla.shard(d, MESH, spec)
    d.copy_(x)
    lazyxla.sync(wait=True)
    assert [b - a for a, b in zip(before, bytes_on_devices())] == [part * 4] * OWN_DEVICES
    assert torch.equal(d.cpu(), x)
    assert spec_of(d) == (*spec, None, None)[: x.dim()]


def test_data_that_is_there_is_moved_in_place() -> None:
    x = grid(8, 8)
    d = x.to(DEVICE)
    view = d[2:4]
    before = bytes_on_devices()
    assert lazyxla.shard(d, MESH, ("data",)) is d
    assert [b - a for a, b in zip(before, bytes_on_devices())] == [
        -256 + 64,
        *[64] * (OWN_DEVICES - 1),
    ]
    lazyxla.shard(d, MESH, (None, "model"))  # by the devices among themselves
    assert spec_of(d) == (None, "model")
    assert torch.equal(d.cpu(), x)
    assert torch.equal(view.cpu(), x[2:4])
    lazyxla.shard(d, lazyxla.Mesh((3,), ("x",), [7, 0, 4]), ("x",))  # over other devices
    assert torch.equal(d.cpu(), x)
    assert torch.equal(view.cpu(), x[2:4])
    assert bytes_on_devices()[1] == before[1]


def test_what_is_recorded_comes_out_spread() -> None:
    before = bytes_on_devices()
    d = torch.ones(64, 64, device=DEVICE) * 3
    lazyxla.shard(d, MESH, ("data", "model"))
    lazyxla.sync(wait=True)
    assert max(b - a for a, b in zip(before, bytes_on_devices())) == 64 * 64 * 4 // 8
    assert torch.equal(d.cpu(), torch.full((64, 64), 3.0))


def test_a_cpu_tensor_moves_to_the_devices() -> None:
    x = torch.nn.Parameter(grid(8, 4))
    address = id(x)
    lazyxla.shard(x, MESH, ("data",))
    assert id(x) == address
    assert x.device.type == DEVICE
    assert x.requires_grad
    assert torch.equal(x.detach().cpu(), grid(8, 4))


@one_process
def test_a_mesh_of_some_devices() -> None:
    mesh = lazyxla.Mesh((2, 2), ("a", "b"), devices=[6, 1, 4, 3])
    x = grid(4, 4)
    before = bytes_on_devices()
    d = sharded(x, "a", "b", mesh=mesh)
    y = (d @ d.t()).relu_()
    torch.testing.assert_close(y.cpu(), x @ x.t())
    changed = [i for i, (a, b) in enumerate(zip(before, bytes_on_devices())) if a != b]
    assert changed == [1, 3, 4, 6]
    assert lazyxla.visualize(d).splitlines()[2:] == ["| 6 | 1 |", "+---+---+", "| 4 | 3 |",
                                                     "+---+---+"]  # fmt: skip


def test_partial_replication_and_pictures() -> None:
    d = sharded(grid(4, 6), None, "model")
    assert lazyxla.visualize(d).splitlines() == [
        "(4, 6): (-, model) over data=4, model=2 on devices 0-7",
        "+---------+---------+",
        "| 0,2,4,6 | 1,3,5,7 |",
        "+---------+---------+",
    ]
    cube = sharded(grid(2, 3, 4), None, None, "data")
    assert lazyxla.visualize(cube).splitlines()[1] == "[0:2, 0:3, 0:1]: 0,1"
    assert lazyxla.visualize(torch.ones(3, device=DEVICE)) == f"(3,) on {DEVICE}:0"
    assert lazyxla.visualize(sharded(torch.tensor(1.0))).endswith("[]: 0,1,2,3,4,5,6,7")


# ---- programs ----


def test_unsharded_operands_are_given_to_all_devices_once() -> None:
    d = sharded(grid(8, 6), "data")
    w = torch.ones(6, 6, device=DEVICE)
    lazyxla.sync(wait=True)
    before = bytes_on_devices()
    first = (d @ w).cpu()
    more = [b - a for a, b in zip(before, bytes_on_devices())]
    assert more == [0, *[6 * 6 * 4] * (OWN_DEVICES - 1)]  # the copies stay with w
    assert torch.equal((d @ w).cpu(), first)
    assert [b - a for a, b in zip(before, bytes_on_devices())] == more
    assert lazyxla.sharding(w) is None  # which is as it was
    assert torch.equal(w.add_(1).cpu(), torch.full((6, 6), 2.0))


def test_what_is_updated_with_sharded_values_is_one_program_from_the_start() -> None:
    d = sharded(torch.ones(8, 6), "data")
    w = torch.zeros(6).to(DEVICE)
    compiles = []
    for _ in range(4):
        w.add_(d.sum(0))
        with counted() as n:
            lazyxla.sync(wait=True)
        compiles.append(n.compiles)
    assert compiles[1:] == [0, 0, 0]
    assert torch.equal(w.cpu(), torch.full((6,), 32.0))
    assert spec_of(w) == (None,)


def test_two_meshes_in_a_program_are_refused() -> None:
    other = lazyxla.Mesh((8,), ("all",))
    x, y = sharded(grid(8, 2), "data"), sharded(grid(8, 2), "all", mesh=other)
    x.add_(y)
    with pytest.raises(ValueError, match="sharded over different meshes are part of one program"):
        lazyxla.sync()
    assert torch.equal(x.cpu(), grid(8, 2))  # as it was
    assert torch.equal(y.cpu(), grid(8, 2))


@one_process
def test_what_has_nothing_in_common_can_be_on_several_meshes() -> None:
    """Programs for each mesh, and one for one device, in one sync."""
    halves = [lazyxla.Mesh((2, 2), ("a", "b"), range(4)), lazyxla.Mesh((4,), ("c",), range(4, 8))]
    specs = [("a", "b"), ("c",)]
    theirs = [grid(8, 2) for _ in range(3)]
    ours = [sharded(x, *spec, mesh=mesh) for x, spec, mesh in zip(theirs, specs, halves)]
    ours.append(theirs[2].to(DEVICE))
    shared = torch.tensor(3.0).to(DEVICE)  # by all programs
    for step in range(4):
        for number, (x, y) in enumerate(zip(ours, theirs)):
            x.mul_(shared).add_(number)
            y.mul_(3.0).add_(number)
        made = lazyxla.memory_stats(7)["allocation.all.allocated"]
        with counted() as n:
            lazyxla.sync(wait=True)
        made = lazyxla.memory_stats(7)["allocation.all.allocated"] - made
        assert made == (3 if step == 0 else 2)  # a result, numbers, and at first a copy of `shared`
        assert n.executions == 3
        assert n.compiles == (3 if step == 0 else 0)
        for x, y in zip(ours, theirs):
            assert torch.equal(x.cpu(), y)
    assert [lazyxla.sharding(x) and spec_of(x) for x in ours] == [("a", "b"), ("c", None), None]


@one_process
def test_models_on_several_meshes_train_as_on_one_device() -> None:
    def train(models: list[torch.nn.Module], device: str) -> list[torch.Tensor]:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
        for step in range(5):
            for model, optimizer in zip(models, optimizers):
                model(torch.full((4, 8), step / 5).to(device)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if device != "cpu":
                lazyxla.sync()
        return [p for model in models for p in model.parameters()]

    torch.manual_seed(0)
    models = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(2)]
    expected = train(deepcopy(models), "cpu")
    for number, model in enumerate(models):
        mesh = lazyxla.Mesh((4,), ("data",), range(4 * number, 4 * number + 4))
        lazyxla.fully_shard(model, mesh)
    for x, y in zip(train(models, DEVICE), expected, strict=True):
        torch.testing.assert_close(x.cpu(), y)


def test_constraints() -> None:
    x = grid(8, 6).requires_grad_()
    d = sharded(grid(8, 6), "data").requires_grad_()
    y = lazyxla.constrain(d * 2, MESH, (None, ("model", "data")))
    assert spec_of(y) == (None, ("model", "data"))
    (y * y).sum().backward()
    ((x * 2) ** 2).sum().backward()
    assert torch.equal(d.grad.cpu(), x.grad)
    plain = lazyxla.constrain(torch.ones(8, device=DEVICE), MESH, ("model",))
    assert spec_of(plain) == ("model",)


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x + 1,)),
    "vjp of vmap": lambda f, x: torch.func.vjp(torch.func.vmap(f, in_dims=1), x)[1](x.mT),
    "vmap of jacrev": lambda f, x: torch.func.vmap(torch.func.jacrev(f), in_dims=1)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: f(y).sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_constraints_within_transforms(name: str) -> None:
    def f(x: torch.Tensor, constrain: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return constrain((x * 2).sin()) * x

    x = torch.linspace(-1, 1, 8).reshape(4, 2)
    split = lambda y: lazyxla.constrain(y, MESH, ("data",))  # noqa: E731
    d = sharded(x.clone())
    actual = TRANSFORMS[name](lambda y: f(y, split), d)
    expected = TRANSFORMS[name](lambda y: f(y, lambda z: z), x)
    to_host = partial(tree_map, torch.Tensor.cpu)
    torch.testing.assert_close(to_host(actual), expected)


def test_the_batch_of_a_constraint_is_the_partitioners_to_split() -> None:
    d = sharded(grid(4, 8, 4))
    for dim in range(3):
        y = torch.vmap(lambda x: lazyxla.constrain(x, MESH, ("data",)), in_dims=dim)(d)
        assert spec_of(y)[1] == "data"


def test_tangents_are_constrained_as_values_are() -> None:
    d, split = sharded(grid(8, 6)), ("data",)
    y, tangent = torch.func.jvp(lambda x: lazyxla.constrain(x, MESH, split), (d,), (d * 2,))
    assert spec_of(y) == spec_of(tangent) == ("data", None)


def test_the_gradient_of_a_leaf_is_spread_as_it_is() -> None:
    w = sharded(torch.randn(8, 6), "model", "data").requires_grad_()
    lazyxla.shard(w, MESH, ("model", "data"))
    x = sharded(torch.randn(16, 8), "data")
    (x @ w).square().sum().backward()
    assert spec_of(w.grad) == ("model", "data")
    lazyxla.shard(w, MESH, ("data",))
    assert spec_of(w.grad) == ("data", None)
    assert spec_of(w) == ("data", None)


def test_random_numbers_do_not_depend_on_the_sharding() -> None:
    for make in (
        lambda t: t.uniform_(),
        lambda t: t.normal_(),
        lambda t: t.bernoulli_(0.3),
        lambda t: t.exponential_(),
        lambda t: t.random_(0, 1000),
        lambda t: torch.nn.functional.dropout(t.fill_(1), 0.4),
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            torch.manual_seed(3)
            expected = make(torch.empty(7, 6, device=DEVICE, dtype=dtype)).cpu()
            for spec in (("data", "model"), (None, "model"), ()):
                d = torch.empty(7, 6, device=DEVICE, dtype=dtype)
                lazyxla.shard(d, MESH, spec)
                torch.manual_seed(3)
                torch.testing.assert_close(make(d).cpu(), expected)


def test_copies_between_devices() -> None:
    x = grid(8, 6)
    d = sharded(x, "data", "model")
    there = d.to(f"{DEVICE}:3")
    assert torch.equal(there.cpu(), x)
    assert lazyxla.sharding(there) is None
    assert torch.equal(d.copy_(there + 1).cpu(), x + 1)
    assert spec_of(d) == ("data", "model")


def test_memory_of_many_devices_is_no_single_one() -> None:
    d = sharded(grid(8, 6), "data")
    with pytest.raises(NotImplementedError, match="spread over many devices"):
        lazyxla.host_view(d)
    assert _C.declared_sharding(d) is not None


def test_host_operators() -> None:
    d = sharded(grid(8, 6), "data")
    expected = torch.unique(grid(8, 6) // 5)
    assert torch.equal(torch.unique(d // 5).cpu(), expected)
    assert torch.equal(torch.nonzero(d > 40).cpu(), torch.nonzero(grid(8, 6) > 40))


def test_tensors_within_transforms_have_no_memory_to_spread() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        lazyxla.shard(x, MESH, ("data",))
        return x.sum()

    with pytest.raises(RuntimeError, match="without memory of its own, as within torch"):
        torch.func.grad(loss)(torch.ones(8, device=DEVICE))


def test_jax_functions_keep_shardings() -> None:
    import jax.numpy as jnp

    mesh = lazyxla.Mesh((4, 2), ("data", "model"))
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    ours, weight = x.to(DEVICE), w.to(DEVICE).requires_grad_()
    lazyxla.shard(ours, mesh, ("data", None))
    lazyxla.shard(weight, mesh, (None, "model"))
    lazyxla.sync(wait=True)
    with counted() as n:
        y = lazyxla.call_jax(lambda a, b: jnp.tanh(a @ b), ours, weight)
        y.square().sum().backward()
        lazyxla.sync(wait=True)
    assert n.executions == 1
    assert lazyxla.sharding(y).spec == ("data", "model")
    assert weight.grad is not None
    assert lazyxla.sharding(weight.grad).spec == (None, "model")
    theirs = w.requires_grad_()
    (x @ theirs).tanh().square().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), theirs.grad)


def test_shard_map_in_jax_functions() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    mesh = lazyxla.Mesh((4, 2), ("data", "model"))
    product = jax.shard_map(
        lambda a, b: jax.lax.psum(a @ b, "model"),
        mesh=mesh.jax_mesh,
        in_specs=(PartitionSpec("data", "model"), PartitionSpec("model")),
        out_specs=PartitionSpec("data"),
    )
    function = lazyxla.jax_function(lambda a, b: jnp.tanh(product(a * 2, b)))
    inputs = [torch.randn(8, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)]
    specs = [("data", "model"), ("model", None)]
    ours = [
        lazyxla.shard(x.detach().to(DEVICE), mesh, spec).requires_grad_()
        for x, spec in zip(inputs, specs)
    ]
    before = lazyxla.counters()
    result = function(*ours)
    result.sum().backward()
    lazyxla.sync(wait=True)
    after = lazyxla.counters()
    assert after["executions"] == before["executions"] + 1
    assert lazyxla.sharding(result).spec == ("data", None)
    expected = (inputs[0] * 2 @ inputs[1]).tanh()
    expected.sum().backward()
    torch.testing.assert_close(result.detach().cpu(), expected.detach())
    for x, theirs, spec in zip(ours, inputs, specs):
        assert lazyxla.sharding(x.grad).spec == spec
        torch.testing.assert_close(x.grad.cpu(), theirs.grad)

    alone = [x.detach().to(DEVICE) for x in inputs]
    with pytest.raises(NotImplementedError, match="was given tensors of one device"):
        function(*alone).cpu()
    other = lazyxla.Mesh((2, 4), ("data", "model"))
    with pytest.raises(NotImplementedError, match="was given tensors of another one"):
        function(*(lazyxla.replicate(x, other) for x in alone)).cpu()
