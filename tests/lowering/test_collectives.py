"""Collectives as XLA's own: values of four replicas on the CPU, and what compilers take."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lazyxla import aot, platforms
from lazyxla.aot.gpus import GPUS
from lazyxla.lowering import (
    LoweringError,
    Node,
    Program,
    Ref,
    Target,
    TensorSpec,
    lower,
    lower_to_text,
)
from tests.lowering.harness import to_numpy, to_torch
from tests.support import needs_cuda, needs_libtpu

REPLICAS = 4
TOKEN = TensorSpec(torch.int64, ())
WORLD = ((0, 1, 2, 3),)
PAIRS = ((2, 0), (1, 3))
SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR = range(8)
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def program(op: str, x: TensorSpec, shape: tuple[int, ...], *args: Any, groups: Any) -> Program:
    outputs = (TensorSpec(x.dtype, shape), TOKEN)
    node = Node(f"lazyxla_c10d::{op}", ([Ref(0), Ref(1)], "group", *args), outputs)
    return Program([x, TOKEN], [node], [Ref(2), Ref(3)], [], {}, None, {"group": groups})


@functools.cache
def devices() -> Any:
    """Four of one process: jaxlib's own, for our plugin's client has as many as the session's."""
    from jaxlib import xla_client

    return xla_client.make_cpu_client(num_devices=REPLICAS).local_devices()


def run(op: str, xs: list[Tensor], shape: Any, *args: Any, groups: Any = WORLD) -> list[Tensor]:
    """What each replica gets that gives its tensor of `xs`."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from jaxlib import _jax

    spec = TensorSpec(xs[0].dtype, tuple(xs[0].shape))
    made = program(op, spec, tuple(shape), *args, groups=groups)
    artifact = lower(made, Target("cpu", stablehlo_version="1.13.0"), verify=True).artifact
    options = _jax.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = REPLICAS
    ids = np.array([device.id for device in devices()]).reshape(REPLICAS, 1)
    build.device_assignment = _jax.DeviceAssignment.create(ids)
    executable = devices()[0].client.compile_and_load(
        artifact, _jax.DeviceList(tuple(devices())), options
    )
    mesh = Mesh(np.array(devices()), ("replica",))
    with jax.enable_x64(True):
        spread, same = (NamedSharding(mesh, PartitionSpec(*axis)) for axis in (("replica",), ()))
        arrays = [jax.device_put(to_numpy(x), d) for x, d in zip(xs, devices())]
        whole = (REPLICAS * arrays[0].shape[0], *arrays[0].shape[1:])
        tokens = [jax.device_put(np.int64(7), d) for d in devices()]
        operands = [
            jax.make_array_from_single_device_arrays(whole, spread, arrays),
            jax.make_array_from_single_device_arrays((), same, tokens),
        ]
        found = executable.execute_sharded(operands).disassemble_into_single_device_arrays()
    assert [int(np.array(token)) for token in found[1]] == [8] * REPLICAS
    return [to_torch(x, spec.dtype) for x in found[0]]


def numbers(dtype: torch.dtype, *shape: int) -> list[Tensor]:
    """Small ones, exactly summed in every dtype, others for each replica."""
    count = torch.Size(shape).numel()
    return [
        ((torch.arange(count) + 3 * i) % 5 - int(dtype.is_signed and dtype != torch.bool))
        .to(dtype)
        .reshape(shape)
        for i in range(REPLICAS)
    ]


def reduced(xs: list[Tensor], op: int) -> Tensor:
    if xs[0].dtype == torch.bool:
        stacked = torch.stack(xs)
        if op == BXOR:
            return stacked.sum(0) % 2 == 1
        return stacked.all(0) if op in (PRODUCT, MIN, BAND) else stacked.any(0)
    binary = {
        SUM: torch.add,
        PRODUCT: torch.mul,
        MIN: torch.minimum,
        MAX: torch.maximum,
        BAND: torch.bitwise_and,
        BOR: torch.bitwise_or,
        BXOR: torch.bitwise_xor,
    }
    return functools.reduce(binary[op], xs)


def reductions(dtype: torch.dtype) -> tuple[int, ...]:
    if dtype.is_complex:
        return SUM, PRODUCT
    arithmetic = SUM, PRODUCT, MIN, MAX
    return arithmetic if dtype.is_floating_point else (*arithmetic, BAND, BOR, BXOR)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(dtype: torch.dtype) -> None:
    xs = numbers(dtype, 2, 3)
    for op in reductions(dtype):
        for found in run("all_reduce", xs, (2, 3), op):
            torch.testing.assert_close(found, reduced(xs, op))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_scatter(dtype: torch.dtype) -> None:
    xs = numbers(dtype, REPLICAS, 3)
    for op in reductions(dtype):
        for i, found in enumerate(run("reduce_scatter", xs, (3,), op)):
            torch.testing.assert_close(found, reduced(xs, op)[i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_only_moved(dtype: torch.dtype) -> None:
    xs = numbers(dtype, 2 * REPLICAS, 3)
    if dtype.is_floating_point:  # every bit arrives
        xs[1][0] = torch.tensor([-0.0, float("nan"), float("-inf")], dtype=dtype)
    same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    for found in run("broadcast", xs, xs[0].shape, 1):
        same(found, xs[1])
        if dtype.is_floating_point:
            assert torch.signbit(found[0, 0])
    for found in run("all_gather", xs, (REPLICAS, *xs[0].shape), REPLICAS):
        same(found, torch.stack(xs))
    rows = [2] * REPLICAS
    for i, found in enumerate(run("all_to_all", xs, xs[0].shape, rows, rows, True)):
        same(found, torch.cat([x[2 * i : 2 * i + 2] for x in xs]))


def test_groups_of_some_replicas() -> None:
    """Members are in the group's order, not in that of the replicas."""
    xs = numbers(torch.float32, 2, 3)
    sums = run("all_reduce", xs, (2, 3), SUM, groups=PAIRS)
    gathered = run("all_gather", xs, (2, 2, 3), 2, groups=PAIRS)
    second = run("broadcast", xs, (2, 3), 1, groups=PAIRS)
    parts = run("reduce_scatter", xs, (3,), SUM, groups=PAIRS)
    for pair in PAIRS:
        mine = [xs[i] for i in pair]
        for member, i in enumerate(pair):
            torch.testing.assert_close(sums[i], sum(mine))
            torch.testing.assert_close(gathered[i], torch.stack(mine))
            torch.testing.assert_close(second[i], mine[1])
            torch.testing.assert_close(parts[i], sum(mine)[member])


def test_nothing_to_exchange() -> None:
    """There is no collective, but a call as any other."""
    for op, given, shape, *args in (
        ("all_reduce", (0, 3), (0, 3), SUM),
        ("broadcast", (0, 3), (0, 3), 1),
        ("all_gather", (0, 3), (4, 0, 3), 4),
        ("reduce_scatter", (4, 0, 3), (0, 3), SUM),
        ("all_to_all", (0, 3), (0, 3), [0] * 4, [0] * 4, True),
        ("all_to_all", (4, 0), (4, 0), [1] * 4, [1] * 4, True),
    ):
        x = TensorSpec(torch.float32, given)  # type: ignore[arg-type]
        text = lower_to_text(program(op, x, shape, *args, groups=WORLD), "cpu")  # type: ignore[arg-type]
        assert "replica_groups" not in text
        assert "stablehlo.add" in text


def test_each_is_the_compilers_own() -> None:
    x = TensorSpec(torch.float32, (4, 3))
    for platform in ("cpu", "cuda", "tpu"):
        for op, shape, *args in (
            ("all_reduce", (4, 3), SUM),
            ("all_gather", (4, 4, 3), 4),
            ("reduce_scatter", (3,), SUM),
            ("all_to_all", (4, 3), [1] * 4, [1] * 4, True),
        ):
            made = program(op, x, shape, *args, groups=WORLD)  # type: ignore[arg-type]
            text = lower_to_text(made, platform)
            assert text.count(f'"stablehlo.{op}"') == 1
            assert "dense<[[0, 1, 2, 3]]>" in text


def test_what_has_no_lowering() -> None:
    x = TensorSpec(torch.float32, (4, 3))
    uneven = program("all_to_all", x, (4, 3), [1, 1, 1, 1], [0, 2, 1, 1], False, groups=WORLD)
    with pytest.raises(LoweringError, match="as many for each process"):
        lower(uneven, "cpu")
    with pytest.raises(LoweringError, match=r"no such reduction of torch.float32, number 5"):
        lower(program("all_reduce", x, (4, 3), BAND, groups=WORLD), "tpu")
    alone = program("all_reduce", x, (4, 3), SUM, groups=WORLD)._replace(groups={})
    with pytest.raises(LoweringError, match="do not span the processes"):
        lower(alone, "tpu")
    assert "lazyxla.host_call" in lower_to_text(alone, "cpu")


@functools.cache
def tpus() -> Any:
    """Four devices that need not be there, and their compiler."""
    from jax.experimental import topologies

    aot.topology("v5e:2x2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_LIBRARY_PATH", str(platforms.plugin_of("tpu")))
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


@functools.cache
def gpus() -> Any:
    from jaxlib import xla_client

    platforms.quiet_plugins()
    path = str(platforms.plugin_of("cuda"))
    api = xla_client.load_pjrt_plugin_dynamically("lazyxla_tests_cuda", path)
    xla_client.initialize_pjrt_plugin("lazyxla_tests_cuda")
    options = {"target_config": GPUS["h100"].target_config(), "topology": "1x1x4"}
    return xla_client.make_c_api_device_topology(api, "", **options)._make_compile_only_devices()


def compile_for(devices: Any, made: Program, target: Target) -> None:
    import numpy as np
    from jax._src.interpreters.mlir import make_ir_context
    from jaxlib import _jax
    from jaxlib.mlir import ir

    options = _jax.CompileOptions()
    build = options.executable_build_options
    options.num_replicas = build.num_replicas = REPLICAS
    ids = np.array([device.id for device in devices]).reshape(REPLICAS, 1)
    build.device_assignment = _jax.DeviceAssignment.create(ids)
    with make_ir_context():
        module = ir.Module.parse(lower_to_text(made, target))
        devices[0].client.compile(module, _jax.DeviceList(tuple(devices)), options)


def all_programs(dtype: torch.dtype, groups: Any) -> list[Program]:
    size = len(groups[0])
    x, parts = TensorSpec(dtype, (2 * size, 3)), TensorSpec(dtype, (size, 2, 3))
    made = [program("all_reduce", x, x.shape, op, groups=groups) for op in reductions(dtype)]
    made += [
        program("reduce_scatter", parts, (2, 3), op, groups=groups) for op in reductions(dtype)
    ]
    return [
        *made,
        program("broadcast", x, x.shape, 1, groups=groups),
        program("all_gather", x, (size, *x.shape), size, groups=groups),
        program("all_to_all", x, x.shape, [2] * size, [2] * size, True, groups=groups),
    ]


@needs_libtpu
@pytest.mark.parametrize("groups", [WORLD, PAIRS], ids=["world", "pairs"])
def test_the_tpus_compiler_takes_them(groups: Any) -> None:
    for dtype in DTYPES:
        for made in all_programs(dtype, groups):
            compile_for(tpus(), made, Target("tpu"))


@needs_cuda
def test_the_gpus_compiler_takes_them() -> None:
    """XLA's, which knows what NCCL reduces."""
    for dtype in DTYPES:
        for made in all_programs(dtype, PAIRS):
            compile_for(gpus(), made, Target("cuda", compute_capability=(9, 0)))


def step_along_two_axes() -> Program:
    """Several collectives in one program, of groups that are the rows and the columns of a grid."""
    x, part = TensorSpec(torch.bfloat16, (2, 2, 3)), TensorSpec(torch.bfloat16, (2, 3))
    nodes = [
        Node("lazyxla_c10d::all_reduce", ([Ref(0), Ref(1)], "rows", SUM), (x, TOKEN)),
        Node("lazyxla_c10d::reduce_scatter", ([Ref(2), Ref(3)], "columns", SUM), (part, TOKEN)),
        Node("lazyxla_c10d::all_gather", ([Ref(4), Ref(5)], "columns", 2), (x, TOKEN)),
    ]
    groups = {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}
    return Program([x, TOKEN], nodes, [Ref(6), Ref(7)], [], {}, None, groups)


@needs_libtpu
def test_the_tpus_compiler_takes_several_together() -> None:
    compile_for(tpus(), step_along_two_axes(), Target("tpu"))


@needs_cuda
def test_the_gpus_compiler_takes_several_together() -> None:
    compile_for(gpus(), step_along_two_axes(), Target("cuda", compute_capability=(9, 0)))
