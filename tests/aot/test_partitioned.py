"""Programs for many chips that are not there: lazyxla.aot.compile with a mesh, compare, search."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lazyxla
from lazyxla import aot
from lazyxla.lowering import partition
from tests.support import DEVICE, needs_libtpu

pytestmark = needs_libtpu

CHIPS = "v5e:4x4"
WIDTH = 512


def _layers(width: int = WIDTH) -> nn.Module:
    """Two products, and nothing that is too small to be split."""
    with torch.device("meta"):
        up = nn.Linear(width, 4 * width, bias=False)
        return nn.Sequential(up, nn.GELU(), nn.Linear(4 * width, width, bias=False))


def _batch(width: int = WIDTH) -> tuple[torch.Tensor]:
    return (torch.empty(64, width, device="meta"),)


def _training(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _tensor_parallel(model: nn.Module, mesh: lazyxla.Mesh) -> None:
    plan = {"0": lazyxla.ColwiseParallel(), "2": lazyxla.RowwiseParallel()}
    lazyxla.parallelize(model, mesh, plan)
    lazyxla.fully_shard(model, mesh, "data")


FSDP: dict[str, Any] = {
    "mesh": ((16,), ("data",)),
    "shardings": lazyxla.fully_shard,
    "input_spec": ("data",),
}
FSDP_TP: dict[str, Any] = {**FSDP, "mesh": ((4, 4), ("data", "model"))}
FSDP_TP["shardings"] = _tensor_parallel


def _compile(how: dict[str, Any], **more: Any) -> aot.CompiledProgram:
    arguments = {"topology": CHIPS, "train_step": _training, **how, **more}
    return aot.compile(_layers(), _batch(), **arguments)


@pytest.fixture(scope="module")
def fsdp() -> aot.CompiledProgram:
    return _compile(FSDP)


@pytest.fixture(scope="module")
def fsdp_tp() -> aot.CompiledProgram:
    return _compile(FSDP_TP)


PARAMETERS = 8 * WIDTH * WIDTH
STATE = 3 * 4 * PARAMETERS  # parameters and AdamW's two averages in float32


def _rows(program: aot.CompiledProgram) -> dict[tuple[str, str], Any]:
    return {(row.kind, row.axes): row for row in program.collectives}


def test_a_fully_sharded_step(fsdp: aot.CompiledProgram) -> None:
    memory = fsdp.memory_stats()
    inputs = 4 * 64 * WIDTH / 16
    assert STATE / 16 + inputs <= memory["arguments"] < 1.02 * STATE / 16 + inputs
    assert memory["aliased"] == STATE / 16
    assert fsdp.fits
    assert (fsdp.mesh, fsdp.num_parameters) == ("data=16", PARAMETERS)
    # Each of the two layers is gathered, or its gradient reduced in whole.
    rows = _rows(fsdp)
    assert {axes for _, axes in rows} == {"data"}
    assert rows["all-gather", "data"].count >= 2
    assert rows["all-gather", "data"].nbytes >= 4 * PARAMETERS
    summed = [r for (kind, _), r in rows.items() if kind in ("all-reduce", "reduce-scatter")]
    assert sum(row.nbytes for row in summed) >= 4 * PARAMETERS
    # Products of the batch's rows with both layers, and of their gradients with the layers' inputs
    # and the second layer; and an update of each number.
    products = 5 * 64 * PARAMETERS / 16
    assert products <= fsdp.flops < 1.2 * products + 20 * PARAMETERS / 16


def test_fully_sharded_and_tensor_parallel(fsdp_tp: aot.CompiledProgram) -> None:
    memory = fsdp_tp.memory_stats()
    inputs = 4 * 64 * WIDTH / 4
    assert STATE / 16 + inputs <= memory["arguments"] < 1.02 * STATE / 16 + inputs
    rows = _rows(fsdp_tp)
    # What the second product yields on each device is a part of the sum, for a batch of 16 rows.
    assert rows["all-reduce", "model"].nbytes == 4 * 16 * WIDTH
    assert rows["all-reduce", "model"].count == 1
    assert any(axes == "data" for _, axes in rows)


def test_data_parallel_sums_each_gradient_once() -> None:
    program = _compile({**FSDP, "shardings": lazyxla.data_parallel})
    assert program.memory_stats()["arguments"] >= STATE
    (row,) = program.collectives
    assert (row.kind, row.axes) == ("all-reduce", "data")
    assert row.nbytes == 4 * PARAMETERS + 4  # the loss, too
    # Twice 15 of 16 parts, over links of two directions of four chips, which are no rings.
    assert row.seconds == pytest.approx(2 * 15 / 16 * row.nbytes / 100e9)
    compute, network = program.compute_seconds, program.network_seconds
    assert program.estimated_seconds == pytest.approx(compute + network)


def test_without_shardings_every_device_has_everything() -> None:
    program = aot.compile(_layers(), _batch(), topology=CHIPS, mesh=((16,), ("data",)))
    assert program.memory_stats()["arguments"] >= 4 * PARAMETERS + 4 * 64 * WIDTH
    assert program.collectives == ()
    assert program.estimated_seconds == program.compute_seconds


def test_64_chips_that_are_linked_in_three_directions() -> None:
    how = {**FSDP, "mesh": ((16, 4), ("data", "model")), "shardings": _tensor_parallel}
    program = _compile(how, topology="v5p:4x4x4")
    assert STATE / 64 <= program.memory_stats()["arguments"] < 1.1 * STATE / 64 + 4 * 64 * WIDTH
    assert str(program).startswith(
        "Program for the mesh data=16, model=4 of Topology('v5p:4x4x4', 64 x TPU v5); for each "
        "device:\n"
    )


class _Attention(nn.Module):
    """Of 8 heads, which share 4 keys in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 8 * 128, bias=False, device="meta")
        self.key = nn.Linear(WIDTH, 4 * 128, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (
            part(x).unflatten(-1, (-1, 128)).transpose(1, 2) for part in (self.query, self.key)
        )
        return F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize(
    ("batch", "local"),
    [(16, (4, 2, 512, 128)), (15, None)],  # 15 do not divide
)
def test_attention_kernels_compute_the_samples_and_heads_of_their_chip(
    batch: int, local: tuple[int, ...] | None
) -> None:
    def spread(model: nn.Module, mesh: lazyxla.Mesh) -> None:
        lazyxla.parallelize(model, mesh, {"[qk]*": lazyxla.ColwiseParallel()})
        lazyxla.fully_shard(model, mesh, "data")

    model, x = _Attention().bfloat16(), torch.empty(batch, 512, WIDTH, device="meta").bfloat16()
    program = aot.compile(
        model,
        (x,),
        topology=CHIPS,
        mesh=((4, 4), ("data", "model")),
        shardings=spread,
        train_step=_training,
    )
    kernels = [
        instruction
        for computation in program._optimized.computations.values()
        for instruction in computation.instructions.values()
        if instruction.raw.get(28) == b"tpu_custom_call"
    ]
    if local is None:
        assert kernels == []
        return
    # The result and its sums; the gradient of queries; those of keys and values.
    assert len(kernels) == 3
    shapes = {part.dims for k in kernels for part in (k.shape, *k.shape.parts)}
    assert local in shapes
    assert all(dims[0] in (1, local[0]) for dims in shapes if len(dims) == 4)
    # Nothing of the batch is gathered.
    gathered = sum(row.nbytes for row in program.collectives if row.kind == "all-gather")
    assert gathered <= 3 * 2 * WIDTH * 12 * 128


def test_samples_are_split_as_values_are_and_not_as_gradients() -> None:
    with aot.capture(CHIPS) as programs:
        mesh = lazyxla.Mesh((4, 4), ("data", "model"))
        weights = [torch.ones(4, 64, 64, device="lazyxla") for _ in range(3)]
        for weight in weights:
            lazyxla.shard(weight.requires_grad_(), mesh, ("model",))
        x = lazyxla.shard(torch.ones(16, 8, 64, device="lazyxla"), mesh, ("data",))
        lazyxla.sync()
        x = lazyxla.constrain(x, mesh, ("data", "?", "?"))
        loss = torch.stack([(x @ weight.sum(0)).square().mean() for weight in weights]).sum()
        loss.backward()
        lazyxla.sync()
    program = programs[-1].program
    assert sum(node.op == "lazyxla::constrain" for node in program.nodes) == 4
    assert partition._batch_axes(program) == ("data",)


def test_inputs_are_spread_by_their_place() -> None:
    places = []

    def spec(place: str, tensor: torch.Tensor) -> tuple[str | None, ...]:
        places.append((place, tuple(tensor.shape)))
        return ("data",) if place == "x.0" else ()

    def call(x: tuple[torch.Tensor, ...], *, scale: torch.Tensor) -> torch.Tensor:
        return x[0] * x[1] * scale

    x, scale = torch.empty(32, 1024, device="meta"), torch.empty(1024, device="meta")
    program = aot.compile(
        lambda x, scale: call(x, scale=scale),
        (),
        {"x": (x, x), "scale": scale},
        topology=CHIPS,
        mesh=((16,), ("data",)),
        input_spec=spec,
    )
    assert sorted(places) == [("scale", (1024,)), ("x.0", (32, 1024)), ("x.1", (32, 1024))]
    assert program.memory_stats()["arguments"] == 4 * 1024 * (2 + 32 + 1)


def test_the_report(fsdp: aot.CompiledProgram) -> None:
    text = str(fsdp)
    lines = text.splitlines()
    assert lines[0] == (
        "Program for the mesh data=16 of Topology('v5e:4x4', 16 x TPU v5 lite); for each device:"
    )
    assert " of 15.75 GiB: fits" in text
    assert "  compute time " in text
    assert " of it while computing" in text
    assert "of 197 TFLOP/s (bfloat16)" in text
    title = next(i for i, line in enumerate(lines) if "collective" in line)
    assert lines[title].split() == ["collective", "axes", "count", "bytes", "time"]
    assert len(lines) - title - 1 == len(fsdp.collectives)


def test_plans_beside_each_other(fsdp: aot.CompiledProgram, fsdp_tp: aot.CompiledProgram) -> None:
    lines = str(fsdp.compare(fsdp_tp)).splitlines()
    assert lines[0].split("  ")[-1].strip() == "data=4, model=4"
    assert "data=16" in lines[0]
    (sums,) = [line for line in lines if line.startswith("all-reduce over model")]
    assert sums.split()[3:5] == ["1", "in"]
    with pytest.raises(TypeError, match=r"compare\(\) takes compiled programs, not 3"):
        fsdp.compare(3)  # type: ignore[arg-type]


def test_search_ranks_what_fits_and_says_why_others_do_not() -> None:
    made = []

    def model(width: int) -> nn.Module:
        made.append(width)
        return nn.Sequential(_layers(), nn.Linear(WIDTH, width, bias=False, device="meta"))

    large = 1 << 25  # 64 GiB for the last layer
    how: dict[str, Any] = {"topology": CHIPS, "input_spec": ("data",)}
    meshes = [((16, 1), ("data", "model")), ((4, 4), ("data", "model"))]

    def spread(module: nn.Module, mesh: lazyxla.Mesh) -> None:
        lazyxla.shard(module[0], mesh, ("model",))

    ranking = aot.search(
        model, _batch(), meshes=meshes, policies=[8, large], shardings=spread, **how
    )
    assert made == [8, large]
    fitting, refused = ranking.plans[:2], ranking.plans[2:]
    assert {plan.mesh for plan in fitting} == {"data=16, model=1", "data=4, model=4"}
    times = [plan.program.estimated_seconds for plan in fitting if plan.program is not None]
    assert times == sorted(times)
    assert len(times) == 2
    assert ranking.best is fitting[0].program
    assert [(plan.policy, plan.program) for plan in refused] == [(large, None)] * 2
    assert "Its inputs take 64.0" in refused[0].reason
    assert f"  64.00 GiB: ({large}, 512) torch.float32, split by (-, -)" in refused[0].reason
    text = str(ranking)
    assert text.splitlines()[0].split()[:3] == ["mesh", "policy", "estimated"]
    assert "\n3. does not fit: the program does not fit in the memory of one TPU v5" in text


def test_wrong_meshes_and_specs_are_refused() -> None:
    def refuses(error: type[Exception], text: str, **how: Any) -> None:
        with pytest.raises(error, match=text):
            _compile({**FSDP, **how})
        assert lazyxla._C.captured_platform() == ""

    refuses(
        ValueError,
        r"a mesh of shape \(4, 2\) has 8 devices, and Topology\('v5e:4x4', 16 x TPU v5 lite\) has "
        "16",
        mesh=((4, 2), ("data", "model")),
    )
    refuses(ValueError, "has 1 devices, and Topology", mesh=lazyxla.Mesh((1,), ("data",)))
    refuses(TypeError, "a mesh is a lazyxla.Mesh, or its shape and the names", mesh=(16,))
    refuses(ValueError, "names the axis 'model', and the mesh has", input_spec=("model",))
    refuses(ValueError, "has 3 entries, and the tensor 2 dimensions", input_spec=(None,) * 3)
    refuses(TypeError, "shardings is a function of the module and the mesh", shardings="data")
    refuses(TypeError, "there is no mesh", mesh=None)
    with pytest.raises(TypeError, match="shardings need the module that they spread"):
        aot.compile(torch.sin, _batch(), topology=CHIPS, **FSDP)
    with pytest.raises(ValueError, match="at least one mesh"):
        aot.search(_layers(), _batch(), topology=CHIPS, meshes=[])
    with pytest.raises(TypeError, match="with policies the model is a function that makes it"):
        aot.search(_layers(), _batch(), topology=CHIPS, meshes=[((16,), ("data",))], policies=[1])
    with pytest.raises(TypeError, match=r"search\(\) takes a module, or policies and what makes"):
        aot.search(lambda policy: _layers(), topology=CHIPS, meshes=[((16,), ("data",))])


def test_a_mesh_of_chips_that_are_not_there_is_for_captures_only() -> None:
    with aot.capture(CHIPS):
        mesh = lazyxla.Mesh((4, 4), ("data", "model"))
        with pytest.raises(ValueError, match="needs 17 devices, and there are 16"):
            lazyxla.Mesh((17,), ("data",))
        with pytest.raises(IndexError, match="there are 16 devices"):
            lazyxla.Mesh((2,), ("data",), devices=[0, 16])
    with pytest.raises(ValueError, match="a topology's devices, which are not there"):
        lazyxla.shard(torch.ones(8), mesh, ("data",))
    x = torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match="a topology's devices, which are not there"):
        lazyxla.constrain(x, mesh, ("data",))


def test_what_has_data_is_not_sharded_within_a_capture() -> None:
    x = torch.arange(8.0).to(DEVICE)
    with aot.capture(CHIPS):
        mesh = lazyxla.Mesh((4, 4), ("data", "model"))
        with pytest.raises(ValueError, match=r"of shape \[8\] that has data cannot be sharded"):
            lazyxla.shard(x, mesh, ("data",))
    assert x.cpu().tolist() == list(range(8))


def test_captured_steps_on_abstract_tensors_are_those_of_a_run() -> None:
    """Shardings that change, and values that are written to what is spread."""
    with aot.capture(CHIPS) as programs:
        mesh = lazyxla.Mesh((4, 4), ("data", "model"))
        x = lazyxla.shard(torch.ones(16, 64), mesh, ("data",))
        assert lazyxla.sharding(x).spec == ("data", None)
        lazyxla.shard(x, mesh, ("data", "model"))
        lazyxla.sync()
        x += 1
        lazyxla.sync()
    moved, added = programs
    assert moved.program.partition is not None
    assert moved.program.partition.inputs[0] == ((("data", 1, 4),), ())
    spread = ((("data", 1, 4),), (("model", 1, 4),))
    assert moved.program.partition.results == (spread,)
    assert added.program.partition.inputs[0] == added.program.partition.results[0] == spread
    assert added.program.donations == {0: 0}
