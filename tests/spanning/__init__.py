"""A PJRT plugin whose clients span several processes: see plugin.cpp. Here it is built."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILT = HERE.parent.parent / "build" / "spanning"
FLAGS = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def cpu_plugin() -> Path:
    """The CPU plugin's library, found without importing torch."""
    spec = importlib.util.find_spec("xla_plugins.xla_cpu_pjrt")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "xla_cpu_pjrt.so"


def plugin_path() -> Path:
    """The plugin's library, which is compiled if its sources or the CPU plugin are new.

    Processes may call this at the same time: one compiles, the others wait.
    """
    cpu = cpu_plugin()
    header = cpu.parent / "include" / "pjrt_c_api.h"
    sources = sorted(HERE.glob("*.cpp"))
    command = ["c++", *FLAGS, f'-DSPANNING_CPU_PLUGIN="{cpu}"', "-isystem", str(header.parent)]
    digest = hashlib.sha256(" ".join(command).encode())
    for file in [*sources, *sorted(HERE.glob("*.h")), header]:
        digest.update(file.read_bytes())
    library = BUILT / f"spanning-{digest.hexdigest()[:16]}.so"
    if library.exists():
        return library
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            subprocess.run(
                [*command, *map(str, sources), "-ldl", "-o", str(unfinished)], check=True
            )
            unfinished.replace(library)
    return library


@contextlib.contextmanager
def environments(size: int, devices: int) -> Iterator[list[dict[str, str]]]:
    """Of processes of lazyxla's that meet by `init_process_group`, each with so many devices.

    The store where they meet is this process's, as it is torchrun's: it outlives each of them.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "PYTHONPATH": str(HERE.parent.parent),
        "OMP_NUM_THREADS": "1",
        "LAZYXLA_PLATFORM": "cpu",
        "LAZYXLA_CPU_DEVICES": str(devices),
        "LAZYXLA_PLUGIN_PATH": str(plugin_path()),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    yield [{**shared, "RANK": str(rank)} for rank in range(size)]
    del store
