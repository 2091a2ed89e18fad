"""Which PJRT plugin to run on.

:func:`resolve` looks at the settings, the installed packages and the machine's device nodes, and
loads nothing: the answer is cheap, and no accelerator is opened by asking.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from lazyxla.config import Settings, settings

HOW_TO_INSTALL = {
    "cpu": "pip install xla-cpu-pjrt",
    "cuda": "pip install 'lazyxla[cuda]'",
    "tpu": "pip install 'lazyxla[tpu]'",
}

# Of a plugin given by path nothing is known; an idle autograd thread costs next to nothing.
_UNKNOWN_DEVICES = 16


@dataclass(frozen=True)
class Platform:
    """A plugin to run on.

    ``name`` is cpu, cuda or tpu, or empty where only the plugin itself knows. ``device_bound`` is
    at least the number of devices it will have, and exactly that if ``bound_is_exact``.
    """

    name: str
    path: str
    device_bound: int
    bound_is_exact: bool = False
    create_options: dict[str, bool | int | float | str] = field(default_factory=dict)


def resolve(config: Settings = settings) -> Platform:
    """The platform that the settings ask for.

    Raises:
        ImportError: the platform's plugin package is not installed; says how to install it.
        FileNotFoundError: ``plugin_path`` names no file.
    """
    if config.plugin_path:
        library = os.path.abspath(os.path.expanduser(config.plugin_path))
        if not os.path.isfile(library):
            raise FileNotFoundError(
                f"LAZYXLA_PLUGIN_PATH (setting plugin_path) names no file: {library}"
            )
        return _platform(config, "" if config.platform == "auto" else config.platform, library)
    name = _first_usable() if config.platform == "auto" else config.platform
    path = plugin_of(name)
    if path is None:
        raise ImportError(
            f"the PJRT plugin for platform {name!r} is not installed: {HOW_TO_INSTALL[name]}"
        )
    return _platform(config, name, path)


def provide(config: Settings = settings) -> Platform:
    """The platform to start now: C++ calls it when the first device is used.

    Raises: as :func:`resolve`.
    """
    # The plugins' logger reads this variable when they are loaded; at 0, its default, it prints
    # messages of no concern to users.
    if config.log_level in ("warning", "error"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    return resolve(config)


def _platform(config: Settings, name: str, path: str) -> Platform:
    if name == "cpu":
        count = config.cpu_devices
        # Always given: without it the plugin chooses a number of its own.
        return Platform(name, path, count, True, {"cpu_device_count": count})
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
    module, library = {
        "cpu": ("xla_plugins.xla_cpu_pjrt", "xla_cpu_pjrt.so"),
        "cuda": ("jax_plugins.xla_cuda13", "xla_cuda_plugin.so"),
        "tpu": ("libtpu", "libtpu.so"),
    }[name]
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # the namespace package around it is missing
        return None
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
