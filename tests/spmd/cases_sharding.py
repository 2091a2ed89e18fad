"""Where the data of a sharded tensor lies: parts on devices, copies, programs, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import OWN_DEVICES, bytes_on_devices, grid, one_process, sharded, spec_of
from models import MESH

import lazyxla
from lazyxla import _C
from lazyxla.checkpoint import LoadPlanner, SavePlanner
from tests.support import DEVICE, counted


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (("data", "data"), ValueError, "along an axis twice"),
        ((("data", "data"),), ValueError, "along an axis twice"),
        (("rows",), ValueError, "names the axis 'rows', and the mesh has"),
        ((None, None, "data"), ValueError, "has 3 entries, and the tensor 2 dimensions"),
        ("data", TypeError, "a tuple with an entry for each dimension"),
        ((0,), TypeError, "an entry that names no axis: 0"),
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
    computed = torch.ones(4, requires_grad=True) * 2
    with pytest.raises(ValueError, match="has a gradient function"):
        lazyxla.shard(computed, MESH, ())
    assert computed.device.type == "cpu"
    for function in (lazyxla.sharding, lazyxla.visualize, lambda x: lazyxla.constrain(x, MESH, ())):
        with pytest.raises(TypeError, match="expected a tensor, got int"):
            function(1)


def test_a_parameter_that_moves_to_the_devices_takes_its_gradient_along() -> None:
    parameter = torch.nn.Parameter(torch.ones(8, 4))
    (parameter * 2).sum().backward()
    lazyxla.shard(parameter, MESH, ("data",))
    assert spec_of(parameter.grad) == ("data", None)
    (parameter * 3).sum().backward()
    assert torch.equal(parameter.grad.cpu(), torch.full((8, 4), 5.0))


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


@pytest.mark.parametrize("state", ["empty", "recorded", "computed"])
@pytest.mark.parametrize(
    ("view", "spec"),
    [
        (lambda x: x.t(), ("data", None)),
        (lambda x: x.view(-1), ("data",)),
        (lambda x: x.view(torch.int32), (None, "model")),
        (lambda x: x.view(2, 4, 4).permute(2, 0, 1), ("data", "model", None)),
    ],
)
def test_memory_is_spread_in_the_dimensions_of_what_is_named(
    view: Callable[[torch.Tensor], torch.Tensor], spec: tuple[Any, ...], state: str
) -> None:
    """The spec is about those, not about those of the tensor that was made first."""
    x = grid(8, 4) + 1
    d = torch.empty(8, 4, device=DEVICE) if state == "empty" else grid(8, 4).to(DEVICE) + 1
    if state == "computed":
        lazyxla.sync()
    named = lazyxla.shard(view(d), MESH, spec)
    assert _C.declared_sharding(named) is not None
    if state == "empty":
        d.copy_(x)
    lazyxla.sync()
    with counted() as n:
        assert spec_of(named) == spec
    assert n.executions == 0  # asked about what is there, not about a copy
    assert torch.equal(named.cpu(), view(x))
    d.mul_(2)
    assert spec_of(named) == spec
    assert torch.equal(d.cpu(), x * 2)


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


@one_process
def test_checkpoints_of_odd_shapes(tmp_path: Path) -> None:
    """Uneven, without elements, of no dimension, nested, transposed, and on one device."""

    def state(factor: int) -> dict[str, Any]:
        return {
            "uneven": sharded(grid(5, 3) * factor, "data", "model"),
            "empty": [sharded(torch.ones(0, 3), "data"), sharded(torch.ones(3, 0), "data")],
            "number": sharded(torch.tensor(2.0 * factor)),
            "transposed": sharded(grid(8, 6) * factor, "data").t(),
            "plain": torch.ones(2, device=DEVICE) * factor,
        }

    dcp.save(state(1), checkpoint_id=tmp_path, planner=SavePlanner())
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=tmp_path, planner=LoadPlanner())
    torch.testing.assert_close(loaded, state(1), rtol=0, atol=0)
    assert spec_of(loaded["uneven"]) == ("data", "model")


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


def test_other_memory_is_spread_as_it_is() -> None:
    """Gradients of leaves follow."""

    def check(*spec: Any) -> None:
        p.grad = None
        (p * grid(8, 4).to(DEVICE)).sum().backward()
        assert spec_of(p) == spec
        assert spec_of(p.grad) == spec

    p = torch.nn.Parameter(lazyxla.shard(grid(8, 4), MESH, ("data",)))
    view = lazyxla.shard(p, MESH, ("data",)).detach()
    check("data", None)
    p.data = sharded(grid(8, 4), "model")
    check("model", None)
    with torch.no_grad():
        p.set_(sharded(grid(8, 4), None, "data"))
    check(None, "data")
    p.data = p.data.double()
    check(None, "data")
    p.grad = None
    other = torch.nn.Parameter(sharded(grid(8, 4), "model", "data"))
    torch.utils.swap_tensors(p, lazyxla.shard(other, MESH, ("model", "data")))
    check("model", "data")
    view.add_(1)
    assert spec_of(view) == ("data", None)
    assert torch.equal(view.cpu(), grid(8, 4) + 1)
    assert torch.equal(p.detach().cpu(), grid(8, 4))


def test_memory_of_another_size_is_not_spread() -> None:
    d = sharded(grid(8, 6), "data")
    d.untyped_storage().resize_(8 * 6 * 4 + 64)
    assert _C.declared_sharding(d) is None
    assert torch.equal(d.cpu(), grid(8, 6))
    d.untyped_storage().resize_(0)
    d.untyped_storage().resize_(8 * 6 * 4)
    d.copy_(grid(8, 6))
    assert lazyxla.sharding(d) is None


def test_a_gradient_in_a_part_of_memory_stays_there() -> None:
    """As where one buffer has the gradients of many parameters."""
    p = torch.nn.Parameter(grid(8, 4).to(DEVICE))
    together = torch.zeros(64, device=DEVICE)
    p.grad = together[:32].view(8, 4)
    lazyxla.shard(p, MESH, ("data",))
    assert spec_of(p) == ("data", None)
    assert _C.declared_sharding(p.grad) is None
    together.add_(1)
    assert torch.equal(p.grad.cpu(), torch.ones(8, 4))
