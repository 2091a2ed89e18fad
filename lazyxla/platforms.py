"""Which PJRT plugin to run on.

:func:`resolve` reads the settings, the installed packages and the machine's device nodes, and loads
nothing: the answer is cheap, and no accelerator is opened.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lazyxla.config import MAX_DEVICES, Settings, plugins, settings
from lazyxla.xla_options import Options, parse

HOW_TO_INSTALL = {
    "cpu": "pip install xla-cpu-pjrt",
    "cuda": "pip install 'lazyxla[cuda]'",
    "tpu": "pip install 'lazyxla[tpu]'",
}

# What `resolve` raises if there is nothing to run on.
UNAVAILABLE = (ImportError, FileNotFoundError, RuntimeError, ValueError)

# What to check if a platform's devices do not start.
_HINTS = {
    "cuda": "`nvidia-smi` tells whether the driver sees the GPU, and who uses its memory",
    "tpu": "only one process at a time can use a TPU: `lsof /dev/accel* /dev/vfio/*` tells which "
    "does; `pip install -U libtpu` brings the compiler of the newest TPUs",
}

# Options of all programs, by what the client that compiles them calls itself.
_COMPILE_OPTIONS: dict[str, Options] = {
    "cpu": {
        # XLA's own loops over reduced dimensions are slower: sums of rows take three times as long.
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE",
        # On some processors, as AMD's Zen 4, XLA multiplies by XNNPACK, and packs a program's
        # argument on the right once for every address: it would not see what an optimizer has
        # written there.
        "xla_cpu_use_xnnpack": False,
    },
    # Processes that share a client would wait for each other to try kernels of every program that
    # one of them compiles; but they may compile different ones.
    "cuda": {"xla_gpu_shard_autotuning": False},
}

# The first of the ports at which processes with a TPU chip each meet; libtpu's own default.
_TPU_PORT = 8476

# Nothing is known about a plugin given by path; an idle autograd thread costs next to nothing.
_UNKNOWN_DEVICES = 16


@dataclass(frozen=True)
class Platform:
    """A plugin to run on.

    ``name`` is cpu, cuda or tpu, or empty where only the plugin itself knows. ``device_bound`` is
    at least the number of devices it will have, and exactly that if ``bound_is_exact``.
    ``spans_processes``: several processes may start one client together. ``create_options`` start
    its client. ``compile_options`` are those of all programs, by what the
    client calls itself and as far as its compiler knows them; a user's settings take precedence.
    """

    name: str
    path: str
    device_bound: int
    bound_is_exact: bool = False
    spans_processes: bool = True
    create_options: Options = field(default_factory=dict)
    compile_options: dict[str, Options] = field(default_factory=lambda: _COMPILE_OPTIONS)

    @property
    def hint(self) -> str:
        """What to check if the devices do not start; may be empty."""
        return _HINTS.get(self.name, "")


def resolve(config: Settings = settings) -> Platform:
    """The platform that the settings ask for.

    Raises:
        ImportError: the platform's plugin package is not installed; says how to install it.
        FileNotFoundError: ``plugin_path`` names no file.
        RuntimeError: the platform is "tpu", but no TPU is attached.
        ValueError: ``create_options`` asks for a number of CPU devices that there cannot be.
    """
    platform = _resolve(config)
    options = {**platform.create_options, **_of_processes(platform), **parse(config.create_options)}
    bound = platform.device_bound
    if platform.bound_is_exact:
        bound = options["cpu_device_count"]  # type: ignore[assignment]
        if type(bound) is not int or not 1 <= bound <= MAX_DEVICES:
            raise ValueError(
                f"LAZYXLA_CREATE_OPTIONS (setting create_options): cpu_device_count is an integer "
                f"of at least 1 and at most {MAX_DEVICES}, got {bound!r}"
            )
    return replace(platform, create_options=options, device_bound=bound)


_processes: tuple[int, int] | None = None
"""Which one this process is, and how many there are, of those that start one client together."""


def set_processes(index: int, count: int) -> None:
    """The client that is started next is one of several processes'.

    Raises:
        RuntimeError: the processes of a TPU's hosts have no chips of their own.
    """
    global _processes
    _processes = index, count
    if resolve().name == "tpu":
        _share_chips(count)


def _share_chips(processes: int) -> None:
    """Gives each process of a TPU's one host a chip of its own, unless the user has said which.

    libtpu reads this from the environment, and each process alone would take all chips.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if here == 1 or "TPU_PROCESS_BOUNDS" in os.environ:
        return
    bounds = {2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}.get(here)
    if here != processes or here != tpu_chips() or bounds is None:
        raise RuntimeError(
            f"{here} processes on a host with {tpu_chips()} TPU chips, {processes} on all hosts: "
            "start one process on each host, which has all its chips (torchrun "
            "--nproc-per-node 1), or on a single host one for each chip; or set "
            "TPU_PROCESS_BOUNDS and the like for each process"
        )
    rank = int(os.environ["LOCAL_RANK"])
    ports = [_TPU_PORT + i for i in range(here)]
    os.environ |= {
        "TPU_PROCESS_BOUNDS": bounds,
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_VISIBLE_CHIPS": str(rank),
        "TPU_PROCESS_ADDRESSES": ",".join(f"localhost:{port}" for port in ports),
        "TPU_PROCESS_PORT": str(ports[rank]),
        "CLOUD_TPU_TASK_ID": str(rank),
    }


def _of_processes(platform: Platform) -> dict[str, Any]:
    """The options that describe the processes to a plugin. That of TPUs finds them out itself."""
    if _processes is None or platform.name == "tpu":
        return {}
    # JAX's names, with which plugins are tested.
    options: dict[str, Any] = {"node_id": _processes[0], "num_nodes": _processes[1]}
    if platform.name == "cuda":
        options["visible_devices"] = _own_gpus(platform.device_bound)
    return options


def _own_gpus(count: int) -> list[int]:
    """The GPUs of this process: those of its machine are divided among the processes there, whose
    number torchrun sets."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    each = max(count // processes, 1)
    first = int(os.environ.get("LOCAL_RANK", "0")) * each
    return list(range(first, first + each))


def _resolve(config: Settings) -> Platform:
    if config.plugin_path:
        library = os.path.abspath(os.path.expanduser(config.plugin_path))
        if not os.path.isfile(library):
            raise FileNotFoundError(
                f"LAZYXLA_PLUGIN_PATH (setting plugin_path) names no file: {library}"
            )
        return _platform(config, "" if config.platform == "auto" else config.platform, library)
    name = _first_usable() if config.platform == "auto" else config.platform
    if name not in HOW_TO_INSTALL:
        return _third_party(name)
    path = plugin_of(name)
    if path is None:
        raise ImportError(
            f"the PJRT plugin for platform {name!r} is not installed: {HOW_TO_INSTALL[name]}"
        )
    if name == "tpu" and not tpu_chips():
        # Without one libtpu searches for minutes before it says so.
        raise RuntimeError(
            "no TPU is attached to this machine: there is no /dev/accel*, and no device of "
            "Google's behind /dev/vfio. LAZYXLA_PLATFORM=cpu runs on the CPU, lazyxla.aot compiles "
            "for TPUs without one. If there is one, it is hidden from this process (a container "
            "has to be started with --privileged), or start it anyway by its plugin's path: "
            f"LAZYXLA_PLATFORM=tpu LAZYXLA_PLUGIN_PATH={path}"
        )
    return _platform(config, name, path)


def provide(config: Settings = settings) -> Platform:
    """The platform to start now: C++ calls it when the first device is used.

    Raises: as :func:`resolve`.
    """
    quiet_plugins(config)
    return resolve(config)


def quiet_plugins(config: Settings = settings) -> None:
    """Before a plugin is loaded: its logger prints no messages of no concern to users."""
    # It reads this variable when it is loaded; its default is 0.
    if config.log_level in ("warning", "error"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")


def _third_party(name: str) -> Platform:
    told = plugins()[name].load()()
    path, options = told if isinstance(told, tuple) else (told, {})
    if not os.path.isfile(path):
        raise FileNotFoundError(f"the plugin of platform {name!r} is not where it says: {path}")
    return Platform(name, os.fspath(path), _UNKNOWN_DEVICES, create_options=dict(options))


def _platform(config: Settings, name: str, path: str) -> Platform:
    if name == "cpu":
        count = config.cpu_devices
        # Always given: without it the plugin chooses a number of its own.
        options: Options = {"cpu_device_count": count}
        # XLA's own plugin supports one process only.
        return Platform(name, path, count, True, bool(config.plugin_path), options)
    if name == "cuda":
        return Platform(name, path, max(1, _count_nodes("/dev", r"nvidia\d+")))
    if name == "tpu":
        # Early generations show two devices per chip.
        return Platform(name, path, 2 * max(1, tpu_chips()))
    return Platform(name, path, _UNKNOWN_DEVICES)


def _first_usable() -> str:
    """The best platform whose plugin is installed and whose device is there."""
    if tpu_chips() and plugin_of("tpu"):
        return "tpu"
    # /dev/dxg is the GPU under WSL.
    if (_count_nodes("/dev", r"nvidia\d+|dxg")) and plugin_of("cuda"):
        return "cuda"
    return "cpu"


def plugin_of(name: str) -> str | None:
    """Path of the platform's installed plugin. Looks for its package without importing it."""
    modules, library = {
        "cpu": (("xla_plugins.xla_cpu_pjrt",), "xla_cpu_pjrt.so"),
        "cuda": (("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"), "xla_cuda_plugin.so"),
        "tpu": (("libtpu",), "libtpu.so"),
    }[name]
    for module in modules:
        try:
            spec = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # the namespace package around it is missing
            continue
        for directory in (spec.submodule_search_locations or ()) if spec else ():
            path = Path(directory) / library
            if path.is_file():
                return str(path)
    return None


def tpu_chips() -> int:
    """How many TPU chips have a device node: /dev/accel0, ... or, from v5e on, /dev/vfio/0, ..."""
    return _count_nodes("/dev", r"accel\d+") or (
        _count_nodes("/dev/vfio", r"\d+") if _has_google_device() else 0
    )


def _has_google_device() -> bool:
    """Whether a PCI device is Google's: /dev/vfio serves any kind of device."""
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            if vendor.read_text().strip() == "0x1ae0":
                return True
        except OSError:
            continue
    return False


def _count_nodes(directory: str, pattern: str) -> int:
    try:
        return sum(1 for name in os.listdir(directory) if re.fullmatch(pattern, name))
    except OSError:
        return 0
