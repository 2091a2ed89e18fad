"""One of the processes that run JAX over the plugin: `python -m tests.spanning.processes`.

JAX is an independent user of the C API, and brings a key-value store. The process runs the cases
of a module that it is told, all processes in the same order, and prints what became of each.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from tests.spanning import HERE, plugin_path

ROOT = HERE.parent.parent
MEET_TIMEOUT_MS = 20_000


def run(module: str, processes: int, devices: int) -> list[dict[str, str]]:
    """What became of each case in each process: nothing, or the traceback of its failure."""
    plugin_path()  # once, before all processes need it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [module, str(processes), str(devices), str(port)]
    with tempfile.TemporaryFile("w+") as errors:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "spanning"},
            )
            for rank in range(processes)
        ]
        try:
            lines = [process.stdout.readline() for process in started if process.stdout]
        finally:
            for process in started:
                process.kill()
                process.communicate()
        errors.seek(0)
        assert all(lines), errors.read()
    return [json.loads(line) for line in lines]


def start_jax(rank: int, processes: int, devices: int, port: int) -> Any:
    """Makes the plugin JAX's only platform; returns JAX's client of the key-value store."""
    import jax
    from jax._src import xla_bridge
    from jax._src.lib import _jax, xla_client

    jax.config.update("jax_enable_x64", True)
    address = f"127.0.0.1:{port}"
    if rank == 0:
        start_jax.service = _jax.get_distributed_runtime_service(address, processes)  # type: ignore[attr-defined]
    store = _jax.get_distributed_runtime_client(address, rank, init_timeout=60)
    store.connect()
    table = xla_client.load_pjrt_plugin_dynamically("spanning", str(plugin_path()))
    options = {
        "node_id": rank,
        "num_nodes": processes,
        "cpu_device_count": devices,
        "meet_timeout_ms": MEET_TIMEOUT_MS,
    }
    xla_bridge.register_backend_factory(
        "spanning",
        lambda: xla_client.make_c_api_client("spanning", options, store),
        priority=500,
        fail_quietly=False,
        c_api=table,
    )
    return store


def run_count() -> int:
    """How many executions over several processes this one has launched."""
    count = ctypes.CDLL(str(plugin_path())).spanning_run_count
    count.restype = ctypes.c_int64
    return count()


def main(rank: int, module: str, processes: int, devices: int, port: int) -> None:
    store = start_jax(rank, processes, devices, port)
    results = {}
    for name, case in importlib.import_module(module).CASES.items():
        try:
            case(store)
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results), flush=True)
    sys.stdin.read()  # until it is killed: the store ends for all when the first process does


if __name__ == "__main__":
    rank, module, *numbers = sys.argv[1:]
    main(int(rank), module, *map(int, numbers))
