"""Programs of JAX over two processes of two devices each, compared with NumPy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.spanning.processes import MEET_TIMEOUT_MS, run_count

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 7


def mesh(order: list[int] | None = None) -> Mesh:
    devices = jax.devices()
    order = order or list(range(len(devices)))
    return Mesh(np.array([devices[i] for i in order]).reshape(2, -1), ("a", "b"))


def shard(x: np.ndarray, spec: P, on: Mesh | None = None) -> jax.Array:
    sharding = NamedSharding(on or mesh(), spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def check_shards(result: jax.Array, expected: np.ndarray, **tolerance: float) -> None:
    """Each device of this process has its part of the value."""
    assert result.dtype == expected.dtype
    assert result.addressable_shards
    for part in result.addressable_shards:
        assert part.device.process_index == jax.process_index()
        np.testing.assert_allclose(np.asarray(part.data), expected[part.index], **tolerance)


def runs(count: int, call: Callable[..., Any], *args: Any) -> Any:
    """What `call` returns, of which `count` programs must run over the processes."""
    before = run_count()
    result = call(*args)
    assert run_count() - before == count
    return result


def devices(store: Any) -> None:
    rank = jax.process_index()
    assert [d.id for d in jax.devices()] == [0, 1, 2, 3]
    assert [d.process_index for d in jax.devices()] == [0, 0, 1, 1]
    assert [d.id for d in jax.local_devices()] == [2 * rank, 2 * rank + 1]
    assert [d.local_hardware_id for d in jax.local_devices()] == [0, 1]
    client = jax.devices()[0].client
    assert client.device_from_local_hardware_id(1).id == 2 * rank + 1
    assert all(d.addressable_memories() for d in jax.local_devices())


def alone(store: Any) -> None:
    """What is for this process' devices concerns no other process."""
    rank = jax.process_index()
    values = [runs(0, jax.jit(jnp.sum), jnp.arange(i + 3.0)) for i in range(rank + 2)]
    assert [float(v) for v in values] == [sum(range(i + 3)) for i in range(rank + 2)]
    assert {d.process_index for v in values for d in v.devices()} == {rank}
    moved = jax.device_put(values[0], jax.local_devices()[1])
    assert float(moved) == float(values[0])


def sums_over_devices(store: Any) -> None:
    total = jax.shard_map(
        lambda x: (jax.lax.psum(x, "a"), jax.lax.psum(x, ("a", "b"))),
        mesh=mesh(),
        in_specs=P(("a", "b")),
        out_specs=(P("b"), P()),
    )
    over_a, over_all = runs(1, jax.jit(total), shard(X, P(("a", "b"))))
    # Sums in another order; NumPy's default tolerance is for float64.
    check_shards(over_a, X[:4] + X[4:], rtol=1e-6)
    check_shards(over_all, X.reshape(4, 2, 4).sum(0), rtol=1e-6)


def resharding(store: Any) -> None:
    for before, after in [(P("a", "b"), P()), (P("a"), P(None, "b")), (P("b"), P("a"))]:
        move = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh(), after))
        check_shards(runs(1, move, shard(X, before)), X + 1)


def product_over_a_sharded_dimension(store: Any) -> None:
    w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    product = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh(), P()))
    result = runs(1, product, shard(X, P(None, ("a", "b"))), shard(w, P(("a", "b"))))
    # Sums in another order, near zero, too.
    check_shards(result, X @ w, rtol=1e-5, atol=1e-6)


def gradient(store: Any) -> None:
    w = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.001 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    expected, ours, x = w, shard(w, P()), shard(X, P(("a", "b")))
    for _ in range(5):
        ours = runs(1, step, ours, x)
        expected = expected - np.float32(0.001) * (2 * X.T @ (X @ expected))
    # Sums in another order, five steps of them.
    check_shards(ours, expected, rtol=1e-5)


def order_of_devices(store: Any) -> None:
    """Shards and devices go in the program's order, not in that of their numbers."""
    on = mesh([3, 0, 2, 1])
    place = jax.shard_map(
        lambda x: x + jax.lax.axis_index(("a", "b")).astype(x.dtype),
        mesh=on,
        in_specs=P(("a", "b")),
        out_specs=P(("a", "b")),
    )
    result = runs(1, jax.jit(place), shard(X, P(("a", "b")), on))
    check_shards(result, X + np.repeat(np.arange(4, dtype=np.float32), 2)[:, None])
    assert {s.device.id for s in result.addressable_shards} == {d.id for d in jax.local_devices()}


def across_processes_only(store: Any) -> None:
    """One device of each process: its other one takes no part."""
    on = Mesh(np.array([jax.devices()[1], jax.devices()[2]]), ("a",))
    x = shard(X, P("a"), on)
    assert len(x.addressable_shards) == 1
    move = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(on, P()))
    check_shards(runs(1, move, x), X * 2)


REPLICAS = """
module @replicas attributes {mhlo.num_replicas = 4 : i32, mhlo.num_partitions = 1 : i32} {
  func.func public @main(%x: tensor<2xf32>) -> (tensor<2xf32>, tensor<ui32>) {
    %sum = "stablehlo.all_reduce"(%x) ({
      ^bb0(%a: tensor<f32>, %b: tensor<f32>):
        %c = stablehlo.add %a, %b : tensor<f32>
        stablehlo.return %c : tensor<f32>
    }) {replica_groups = dense<[[0, 2], [1, 3]]> : tensor<2x2xi64>}
      : (tensor<2xf32>) -> tensor<2xf32>
    %id = stablehlo.replica_id : tensor<ui32>
    return %sum, %id : tensor<2xf32>, tensor<ui32>
  }
}
"""


def compile_replicas() -> Any:
    from jax._src.lib import xla_client

    options = xla_client.CompileOptions()
    options.num_replicas = 4
    options.device_assignment = xla_client.DeviceAssignment.create(np.arange(4).reshape(4, 1))
    client = jax.devices()[0].client
    return client.compile_and_load(REPLICAS, xla_client.DeviceList(tuple(jax.devices())), options)


def run_replicas(program: Any) -> None:
    x = np.arange(8, dtype=np.float32)
    results = runs(1, program.execute_sharded, [shard(x, P(("a", "b")))])
    sums, ids = results.disassemble_into_single_device_arrays()
    parts = x.reshape(4, 2)
    own = [d.id for d in jax.local_devices()]
    assert [int(i) for i in ids] == own
    for replica, value in zip(own, sums, strict=True):
        np.testing.assert_array_equal(value, parts[replica] + parts[(replica + 2) % 4])


def replicas(store: Any) -> None:
    run_replicas(compile_replicas())


def loaded_beside_compiled(store: Any) -> None:
    """A process may load what another has compiled: that is the same program."""
    client = jax.devices()[0].client
    if jax.process_index() == 0:
        program = compile_replicas()
        store.key_value_set_bytes("program", client.serialize_executable(program))
    else:
        serialized = store.blocking_key_value_get_bytes("program", MEET_TIMEOUT_MS)
        from jax._src.lib import xla_client

        program = client.deserialize_executable(
            serialized, xla_client.DeviceList(tuple(jax.devices()))
        )
    run_replicas(program)


# Not those of two bits, which the CPU's own collectives mix up, in one process as in several.
UNSIGNED = [np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, ml_dtypes.uint4]
DTYPES = [
    *UNSIGNED,
    *(np.int8, np.int16, np.int32, np.int64, ml_dtypes.int4),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16),
    *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn),
]


def dtypes(store: Any) -> None:
    """The values of another process' shards arrive as they are, of every type."""
    gather = jax.jit(lambda x: x[::-1], out_shardings=NamedSharding(mesh(), P()))
    for dtype in DTYPES:
        least = 0 if dtype in UNSIGNED else -2
        x = (np.arange(24).reshape(8, 3) % 4 + least).astype(dtype)
        result = runs(1, gather, shard(x, P(("a", "b"))))
        for part in result.addressable_shards:
            assert part.data.dtype == dtype
            np.testing.assert_array_equal(np.asarray(part.data), x[::-1], err_msg=str(dtype))


def shapes(store: Any) -> None:
    """Scalars, and arrays without elements."""
    add = jax.jit(lambda x, y, z: (x + 1, y * 2, z + x), out_shardings=NamedSharding(mesh(), P()))
    x, y, z = np.float32(3), np.zeros((0, 4), np.float32), np.ones((4, 1, 2), np.float32)
    results = runs(1, add, shard(np.array(x), P()), shard(y, P()), shard(z, P("a")))
    for result, expected in zip(results, (np.array(x + 1), y * 2, z + x), strict=True):
        check_shards(result, expected)


def layouts(store: Any) -> None:
    """An argument that lies in column-major order on its device does so on the stand-ins."""
    columns = Format(Layout((1, 0)), NamedSharding(mesh(), P("a")))
    parts = [
        jax.device_put(X[row * 4 : row * 4 + 4], Format(Layout((1, 0)), SingleDeviceSharding(d)))
        for row, devices in enumerate(mesh().devices)
        for d in devices
        if d.process_index == jax.process_index()
    ]
    x = jax.make_array_from_single_device_arrays(X.shape, columns.sharding, parts)
    assert x.format.layout.major_to_minor == (1, 0)
    gather = jax.jit(
        lambda x: x * 2, in_shardings=columns, out_shardings=NamedSharding(mesh(), P())
    )
    check_shards(runs(1, gather, x), X * 2)


def donation(store: Any) -> None:
    step = jax.jit(lambda w, x: (w + x.sum(0), w.sum()), donate_argnums=0)
    w, x = shard(X, P("a", "b")), shard(X, P("a", "b"))
    for _ in range(3):
        old = w
        w, _ = runs(1, step, w, x)
        assert old.is_deleted()
        assert not x.is_deleted()
    # Three sums in another order.
    check_shards(w, X + 3 * X.sum(0), rtol=1e-5)


def other_programs(store: Any) -> None:
    """Processes that launch different programs learn so, and go on afterwards."""
    functions = [lambda x: x + 1, lambda x: x + 2]
    different = jax.jit(functions[jax.process_index()])
    x = shard(X, P("a", "b"))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"INTERNAL: .* different programs: process"
    ):
        runs(0, different, x)
    check_shards(runs(1, jax.jit(functions[0]), x), X + 1)


def threads(store: Any) -> None:
    """Two sets of devices, each with a thread that runs its programs in order."""
    failures: list[BaseException] = []

    def train(ids: tuple[int, int]) -> None:
        try:
            on = Mesh(np.array([jax.devices()[i] for i in ids]), ("a",))
            step = jax.jit(lambda x: x[::-1] + 1, out_shardings=NamedSharding(on, P("a")))
            x, expected = shard(X, P("a"), on), X
            for _ in range(20):
                x, expected = step(x), expected[::-1] + 1
            check_shards(x, expected)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=train, args=(ids,)) for ids in [(0, 2), (1, 3)]]

    def work() -> None:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    runs(40, work)
    assert not failures, failures


def much_data(store: Any) -> None:
    x = np.arange(2 << 20, dtype=np.float64).reshape(4, -1)
    total = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh(), P()))
    check_shards(runs(1, total, shard(x, P("a", "b"))), x.sum(0))


CASES: dict[str, Callable[[Any], None]] = {
    case.__name__: case
    for case in (
        devices,
        alone,
        sums_over_devices,
        resharding,
        product_over_a_sharded_dimension,
        gradient,
        order_of_devices,
        across_processes_only,
        replicas,
        loaded_beside_compiled,
        dtypes,
        shapes,
        layouts,
        donation,
        other_programs,
        threads,
        much_data,
    )
}
