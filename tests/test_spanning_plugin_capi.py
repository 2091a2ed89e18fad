"""The plugin of tests/spanning, by its C functions: several clients in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from jax._src.lib import xla_client

from tests.spanning import capi

ROTATE = """
module @rotate {
  func.func public @main(%x: tensor<3xf32> {tf.aliasing_output = 0 : i32}) -> tensor<3xf32> {
    %y = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<PAIRS> : tensor<Nx2xi64>}
      : (tensor<3xf32>) -> tensor<3xf32>
    %z = stablehlo.add %y, %y : tensor<3xf32>
    return %z : tensor<3xf32>
  }
}
"""
DOUBLE = """
module @double {
  func.func public @main(%x: tensor<3xf32>) -> tensor<3xf32> {
    %y = stablehlo.add %x, %x : tensor<3xf32>
    return %y : tensor<3xf32>
  }
}
"""
X = np.arange(12, dtype=np.float32).reshape(4, 3)


def rotate(count: int) -> str:
    """Device i + 1 gets twice what device i has, in memory that was its own argument's."""
    pairs = [[i, (i + 1) % count] for i in range(count)]
    return ROTATE.replace("PAIRS", str(pairs)).replace("N", str(count))


def options(replicas: int = 1, devices: Sequence[int] | None = None) -> bytes:
    result = xla_client.CompileOptions()
    result.num_replicas = replicas
    if devices is not None:
        assignment = np.array(devices).reshape(replicas, -1)
        result.device_assignment = xla_client.DeviceAssignment.create(assignment)
    return result.SerializeAsString()


@pytest.fixture(scope="module")
def api() -> capi.Api:
    return capi.Api()


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results or exceptions of calls that several processes would make."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except capi.PjrtError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def start(api: capi.Api, nodes: int, store: capi.Store | None = None, **others: int) -> list[Any]:
    store = store or capi.Store()
    return at_once(
        [lambda node=node: capi.Client(api, store, node, nodes, **others) for node in range(nodes)]
    )


@pytest.fixture
def pair(api: capi.Api) -> Iterator[list[capi.Client]]:
    """Two processes of two devices each."""
    clients = start(api, 2, cpu_device_count=2)
    yield clients
    for client in clients:
        client.destroy()


def test_options(api: capi.Api) -> None:
    for store, (node, nodes), others, message in [
        (None, (0, 2), {}, "needs the key-value callbacks"),
        (capi.Store(), (2, 2), {}, "node_id is 2 of 2"),
        (capi.Store(), (-1, 2), {}, "option node_id is -1"),
        (capi.Store(), (0, 1), {"cpu_device_count": 0}, "option cpu_device_count is 0"),
    ]:
        with pytest.raises(capi.PjrtError, match=message) as caught:
            capi.Client(api, store, node, nodes, **others)
        assert caught.value.code == capi.INVALID_ARGUMENT


def test_one_process_needs_no_store(api: capi.Api) -> None:
    client = capi.Client(api, None, 0, 1, cpu_device_count=3)
    assert client.list("AddressableDevices") == client.list("Devices")
    assert len(client.list("Devices")) == 3
    before = api.run_count()
    program = client.compile(rotate(3), options(3, [2, 0, 1]))
    rows = [[client.upload(x, device)] for x, device in zip(X[:3], program.devices(), strict=True)]
    results = [client.download(row[0]) for row in program.execute(rows)]
    np.testing.assert_array_equal(results, 2 * X[[2, 0, 1]])
    assert api.run_count() == before
    client.destroy()


def test_processes_that_do_not_meet(api: capi.Api) -> None:
    with pytest.raises(capi.PjrtError, match="process 1 did not start: nothing came") as caught:
        capi.Client(api, capi.Store(), 0, 2, meet_timeout_ms=50)
    assert caught.value.code == capi.DEADLINE_EXCEEDED

    store = capi.Store()
    errors = at_once(
        [lambda n=n: capi.Client(api, store, n, 2, cpu_device_count=n + 1) for n in range(2)]
    )
    assert "process 1 started 2 processes of 2 devices, this one 2 processes of 1" in str(errors[0])
    assert "process 0 started 2 processes of 1 devices" in str(errors[1])
    with pytest.raises(capi.PjrtError, match="another client has started as process 1"):
        capi.Client(api, store, 1, 2)


def test_devices(api: capi.Api, pair: list[capi.Client]) -> None:
    for node, client in enumerate(pair):
        assert capi.int_of(api.call("PJRT_Client_ProcessIndex", client.raw, out=1)[1]) == node
        devices = client.list("Devices")
        assert len(devices) == 4
        assert client.list("AddressableDevices") == devices[2 * node : 2 * node + 2]
        memories = []
        for i, device in enumerate(devices):
            is_own = i // 2 == node
            assert api.call("PJRT_Device_IsAddressable", device, out=1)[1] & 1 == is_own
            local = api.call("PJRT_Device_LocalHardwareId", device, out=1)[1]
            assert capi.int_of(local) == (i % 2 if is_own else -1)
            description = api.call("PJRT_Device_GetDescription", device, out=1)[1]
            process = api.call("PJRT_DeviceDescription_ProcessIndex", description, out=1)[1]
            assert capi.int_of(process) == i // 2
            _, own, count = api.call("PJRT_Device_AddressableMemories", device, out=2)
            assert (count > 0) == is_own
            memories += capi.ctypes.cast(own, capi.Words)[:count] if is_own else []
            if is_own:
                found = api.call("PJRT_Client_LookupAddressableDevice", client.raw, i % 2, out=1)
                assert found[2] == device
                assert api.call("PJRT_Device_DefaultMemory", device, out=1)[1] in memories
                continue
            for function in ("PJRT_Device_DefaultMemory", "PJRT_Device_MemoryStats"):
                with pytest.raises(capi.PjrtError, match=f"of a device of process {1 - node}"):
                    api.call(function, device, out=30)
        assert sorted(client.list("AddressableMemories")) == sorted(memories)
        with pytest.raises(capi.PjrtError, match="no device with the hardware id 2"):
            api.call("PJRT_Client_LookupAddressableDevice", client.raw, 2, out=1)
        topology = api.call("PJRT_Client_TopologyDescription", client.raw, out=1)[1]
        described = api.call("PJRT_TopologyDescription_GetDeviceDescriptions", topology, out=2)
        processes = [
            capi.int_of(api.call("PJRT_DeviceDescription_ProcessIndex", d, out=1)[1])
            for d in capi.ctypes.cast(described[1], capi.Words)[: described[2]]
        ]
        assert processes == [0, 0, 1, 1]


def test_buffers_of_other_processes(api: capi.Api, pair: list[capi.Client]) -> None:
    own, _ = pair
    near, far = own.list("Devices")[1], own.list("Devices")[2]
    every = own.list("AddressableMemories")
    buffer = own.upload(X, near)
    np.testing.assert_array_equal(own.download(buffer), X)
    copy = api.call("PJRT_Buffer_CopyToDevice", buffer, own.list("Devices")[0], out=1)[2]
    np.testing.assert_array_equal(own.download(copy), X)
    np.testing.assert_array_equal(own.download(own.upload(X, 0, memory=every[0])), X)

    for refused in (
        lambda: own.upload(X, far),
        lambda: api.call("PJRT_Buffer_CopyToDevice", buffer, far, out=1),
    ):
        with pytest.raises(capi.PjrtError, match="of process 1, which process 0") as caught:
            refused()
        assert caught.value.code == capi.INVALID_ARGUMENT
    np.testing.assert_array_equal(own.download(buffer), X)


def run(pair: list[capi.Client], programs: list[capi.Program], x: np.ndarray, **how: Any) -> Any:
    """Launches on rows of `x`, one for each device; returns the arguments and the outcomes."""
    rows: list[list[list[int]]] = []
    parts = iter(x)
    for client, program in zip(pair, programs, strict=True):
        rows.append([[client.upload(next(parts), d)] for d in program.devices()])
    outcomes = at_once(
        [lambda p=p, r=r: p.execute(r, **how) for p, r in zip(programs, rows, strict=True)]
    )
    return rows, outcomes


@pytest.mark.parametrize("events", [True, False])
def test_donation(pair: list[capi.Client], events: bool) -> None:
    programs = [client.compile(rotate(4), options(4, range(4))) for client in pair]
    for kept in ([], [0]):
        rows, outcomes = run(pair, programs, X, kept=kept, events=events)
        for node, client in enumerate(pair):
            for i, (arguments, results) in enumerate(zip(rows[node], outcomes[node], strict=True)):
                np.testing.assert_array_equal(client.download(results[0]), 2 * X[2 * node + i - 1])
                assert client.is_deleted(arguments[0]) == (not kept)
                if kept:
                    np.testing.assert_array_equal(client.download(arguments[0]), X[2 * node + i])


def test_programs_without_devices(api: capi.Api, pair: list[capi.Client]) -> None:
    """They are for this process' devices, if those are enough."""
    before = api.run_count()
    for replicas in (1, 2):
        for client in pair:
            program = client.compile(DOUBLE, options(replicas))
            assert program.devices() == client.list("AddressableDevices")[:replicas]
            rows = [[client.upload(x, d)] for x, d in zip(X, program.devices(), strict=False)]
            for x, results in zip(X, program.execute(rows), strict=False):
                np.testing.assert_array_equal(client.download(results[0]), 2 * x)
    assert api.run_count() == before
    programs = [client.compile(rotate(4), options(4)) for client in pair]
    _, outcomes = run(pair, programs, X)
    assert api.run_count() == before + 2
    results = [pair[i // 2].download(outcomes[i // 2][i % 2][0]) for i in range(4)]
    np.testing.assert_array_equal(results, 2 * X[[3, 0, 1, 2]])


def test_programs_for_other_processes(pair: list[capi.Client]) -> None:
    with pytest.raises(capi.PjrtError, match="for no device of process 1") as caught:
        pair[1].compile(DOUBLE, options(1, [0]))
    assert caught.value.code == capi.INVALID_ARGUMENT


def test_a_process_that_cannot_launch(api: capi.Api, pair: list[capi.Client]) -> None:
    """All processes learn of it, and what they launch next runs."""
    programs = [client.compile(rotate(4), options(4, range(4))) for client in pair]
    rows, _ = run(pair, programs, X)  # which donates the arguments
    fresh = [[pair[0].upload(x, d)] for x, d in zip(X, programs[0].devices(), strict=False)]
    before = api.run_count()
    errors = at_once([lambda: programs[0].execute(fresh), lambda: programs[1].execute(rows[1])])
    for error in errors:
        assert "process 1 could not launch the program" in str(error)
        assert error.code == capi.INTERNAL
    assert not pair[0].is_deleted(fresh[0][0])
    errors = at_once([lambda: programs[0].execute(fresh[:1]), lambda: programs[1].execute(rows[1])])
    assert "arguments for 1 devices, of which the program has 2 in this process" in str(errors[1])
    assert api.run_count() == before
    run(pair, programs, X)
    assert api.run_count() == before + 2


def test_different_programs(api: capi.Api, pair: list[capi.Client]) -> None:
    """Other code, or the same for the devices in another order."""
    before = api.run_count()
    usual = options(4, range(4))
    for others in [(DOUBLE, usual), (rotate(4), options(4, [1, 0, 2, 3]))]:
        programs = [pair[0].compile(rotate(4), usual), pair[1].compile(*others)]
        rows, errors = run(pair, programs, X)
        for node, error in enumerate(errors):
            assert f"process {1 - node} another than process {node}" in str(error)
            assert error.code == capi.INTERNAL
            assert not any(pair[node].is_deleted(row[0]) for row in rows[node])
    assert api.run_count() == before


def test_a_process_that_does_not_come(api: capi.Api) -> None:
    clients = start(api, 3, meet_timeout_ms=200)
    programs = [clients[0].compile(rotate(2), options(2, d)) for d in ([0, 1], [0, 2])]
    row = [[clients[0].upload(X[0], clients[0].list("Devices")[0])]]
    with pytest.raises(capi.PjrtError, match="process 1 launched none within 200 ms") as caught:
        programs[0].execute(row)
    assert caught.value.code == capi.INTERNAL
    assert "processes launched different programs" in str(caught.value)
    # Whatever it launches now meets the wrong one: these devices are lost, others are not.
    with pytest.raises(capi.PjrtError, match="an execution before has failed: processes launched"):
        programs[0].execute(row)
    pair = [clients[0], clients[2]]
    _, outcomes = run(pair, [programs[1], clients[2].compile(rotate(2), options(2, [0, 2]))], X)
    results = [c.download(o[0][0]) for c, o in zip(pair, outcomes, strict=True)]
    np.testing.assert_array_equal(results, 2 * X[[1, 0]])


@pytest.mark.parametrize("overwrites", [True, False])
def test_memory_of_the_store(api: capi.Api, overwrites: bool) -> None:
    """Where values can be overwritten, those of past executions take none."""
    store = capi.Store(overwrites)
    pair = start(api, 2, store)
    programs = [client.compile(rotate(2), options(2, [0, 1])) for client in pair]
    for _ in range(10):
        run(pair, programs, X[:2])
    assert store.handed_out() == 0
    records = [v for k, v in store.values.items() if k.startswith("spanning/run/0,1/")]
    assert len(records) == 20
    assert sum(len(v) > 1 for v in records) == (2 if overwrites else 20)


def test_overlapping_sets_of_devices(api: capi.Api) -> None:
    """Threads of a process launch on sets that share devices, each set in its own order."""
    clients = start(api, 3)
    sets = [[0, 1], [1, 2], [2, 0], [0, 1, 2]]
    barrier = threading.Barrier(sum(map(len, sets)))

    def train(node: int, devices: list[int]) -> np.ndarray:
        client = clients[node]
        program = client.compile(rotate(len(devices)), options(len(devices), devices))
        buffer = client.upload(X[node], client.list("AddressableDevices")[0])
        barrier.wait()
        for _ in range(4):
            ((buffer,),) = program.execute([[buffer]])
        return client.download(buffer)

    calls = [(node, devices) for devices in sets for node in devices]
    results = at_once([lambda c=c: train(*c) for c in calls])
    for (node, devices), result in zip(calls, results, strict=True):
        source = devices[(devices.index(node) - 4) % len(devices)]
        np.testing.assert_array_equal(result, 16 * X[source])
