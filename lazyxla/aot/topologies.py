"""Devices known by description: TPUs and GPUs by name, and the compilers for them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from lazyxla import _C, platforms
from lazyxla.aot.chips import Chip, find_chip
from lazyxla.aot.collectives import Grid
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.gpus import GPUS
from lazyxla.aot.links import Network, find_links
from lazyxla.lowering import Lowered, Program, Target, lower, lower_to_text
from lazyxla.xla_options import check_types, refused

_EXAMPLES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")

# libtpu divides by these numbers: a zero ends the process.
_FORM = re.compile(r"[A-Za-z0-9_ ]+[:=][1-9]\d*(x[1-9]\d*){0,2}(_twisted|_untwisted)?")

# What libtpu reads when it is loaded. On a machine without a TPU it would ask Google's metadata
# server for minutes, print warnings about its accelerator type and host name, and let only one
# process load it, as if there were a device. Whether the values of these two change what it
# compiles is not known.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

Options = Mapping[str, bool | int | float | str]


def check_options(options: Options | None) -> Options:
    """Checks the types of what a function of :mod:`lazyxla.aot` takes as its `options`."""
    return check_types(options, "the options of lazyxla.aot")


class Topology:
    """Devices known by description, to compile for. Made by :func:`topology`."""

    def __init__(self, name: str, raw: Any, platform: str, runs_here: bool = False) -> None:
        self.name = name
        self.platform = platform
        """What programs are lowered for: ``"tpu"`` or ``"cuda"``."""
        self.runs_here = runs_here
        """Whether the devices are those of this process."""
        self._raw = raw

    @property
    def platform_version(self) -> str:
        """The compiler's version, in its own words."""
        return self._raw.platform_version

    @property
    def device_kind(self) -> str:
        """The model of the devices, for example ``"TPU v5 lite"``."""
        return self._raw.devices[0].kind

    @property
    def num_devices(self) -> int:
        """How many devices there are; chips of v2, v3, v4 and tpu7x are two devices each."""
        return len(self._raw.devices)

    @property
    def num_hosts(self) -> int:
        """How many machines the devices belong to."""
        return len({device.process_index for device in self._raw.devices})

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device that programs may use; None if the compiler does not report it."""
        return self._raw.devices[0].attributes.get("device_memory_bytes_limit")

    def compile(self, program: Program | bytes, options: Options | None = None) -> CompiledProgram:
        """Compiles a program for one device of the topology.

        Args:
            program: a recorded program, which is lowered for the platform first, or StableHLO: a
                portable artifact, or MLIR as text or bytecode.
            options: the compiler's options by name, for example
                ``{"xla_tpu_enable_latency_hiding_scheduler": True}``.

        Raises:
            LoweringError: an operator of the program has no lowering.
            torch.OutOfMemoryError: the program needs more memory than a device has; the compiler
                says how much, and lists the largest arrays.
            TypeError: the options are no dict from names to bool, int, float or str.
            ValueError: the compiler does not take the options.
            RuntimeError: the compiler refuses the program; says why.
        """
        artifact = self.lower(program).artifact if isinstance(program, Program) else program
        return self._compile(artifact, check_options(options))

    def _compile(
        self,
        artifact: bytes,
        options: Options,
        recorded: Options | None = None,
        grid: Grid | None = None,
    ) -> CompiledProgram:
        """:meth:`compile` of what is lowered, for one device or for those of a grid.

        `options` are what the caller was given, `recorded` those that the program has besides.
        """
        try:
            raw = self._raw.compile(artifact, {**(recorded or {}), **options})
        except RuntimeError as error:
            if "INVALID_ARGUMENT" in str(error) and options:
                self._check(dict(options))
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise torch.OutOfMemoryError(
                f"the program does not fit in the memory of one {self.device_kind}: {error}"
            ) from error
        network = self._network() if grid is not None else None
        return CompiledProgram(raw, str(self), self.memory_bytes, self.chip, grid, network)

    def _check(self, options: dict[str, bool | int | float | str]) -> None:
        """Raises a ValueError for options that the compiler does not take."""
        try:
            self._raw.check_options(options)
        except RuntimeError as error:
            raise refused(options, error) from None

    def _network(self) -> Network | None:
        """The links between the devices; None if they are not known."""
        links = find_links(self.device_kind)
        places = [device.attributes.get("coords") for device in self._raw.devices]
        if links is None or None in places:
            return None
        return Network(links, tuple(tuple(place) for place in places))

    def lower(self, program: Program) -> Lowered:
        """Lowers a recorded program for the platform.

        Args:
            program: a recorded program, as :class:`CapturedProgram` has it.

        Raises:
            LoweringError: an operator of the program has no lowering.
        """
        return lower(program, self._target())

    def lower_to_text(self, program: Program) -> str:
        """The module of StableHLO that :meth:`lower` makes, as text.

        Args:
            program: a recorded program, as :class:`CapturedProgram` has it.
        """
        return lower_to_text(program, self._target())

    def _target(self) -> Target:
        return Target.of(self.platform, self._raw.devices[0], self._raw.plugin[3])

    @property
    def chip(self) -> Chip | None:
        """The published peaks of one device; None if they are not known."""
        return find_chip(self.device_kind)

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, {self.num_devices} x {self.device_kind})"


def topology(name: str | None = None) -> Topology:
    """Describes devices by their name; they need not be attached.

    Args:
        name: TPUs by their generation and the number of chips in each direction, for example
            ``"v5e:2x2"``, four chips of TPU v5e. v4, v5p and tpu7x have three directions, v2, v3,
            v5e and v6e two. Or one NVIDIA GPU: ``"l4"``, ``"a100"`` (80 GB), ``"h100"`` (SXM),
            ``"h200"`` or ``"b200"``. None describes the devices of this process, of any platform,
            and starts them.

    Raises:
        ImportError: the compiler, libtpu or CUDA's plugin, is not installed; says how to install
            it.
        ValueError: there are no such devices; says why, and some names that there are.
    """
    if name is None:
        return Topology("this process", _C.Topology.of_client(), _C.platform(), runs_here=True)
    return _gpu(name) if name in GPUS else _tpus(name)


def _gpu(name: str) -> Topology:
    path = _compiler("cuda", "GPUs", "the plugin for CUDA")
    platforms.quiet_plugins()
    options = {"target_config": GPUS[name].target_config(), "topology": "1x1x1"}
    raw = _C.Topology(path, "", options)
    return Topology(name, raw, raw.platform_name)


def _tpus(name: str) -> Topology:
    if not _FORM.fullmatch(name):
        raise _unknown(name, "it is not of the form <generation>:<chips>x<chips>[x<chips>]")
    path = _compiler("tpu", "TPUs", "libtpu")
    if not platforms.tpu_chips():
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
    try:
        raw = _C.Topology(path, name, {})
    except RuntimeError as error:
        if "INVALID_ARGUMENT" not in str(error):
            raise
        reason = str(error).split("INVALID_ARGUMENT: ", 1)[1]
        raise _unknown(name, reason) from error
    return Topology(name, raw, raw.platform_name)


def _compiler(platform: str, devices: str, compiler: str) -> str:
    """The path of the plugin that has the platform's compiler."""
    path = platforms.plugin_of(platform)
    if path is None:
        raise ImportError(
            f"compiling for {devices} needs their compiler, {compiler}, which is not installed: "
            f"{platforms.HOW_TO_INSTALL[platform]}"
        )
    return path


def _unknown(name: str, reason: str) -> ValueError:
    return ValueError(
        f"{name!r} names no TPUs: {reason}. Names are a generation (v2, v3, v4, v5e, v5p, v6e, "
        f"tpu7x) and chips in each direction, for example {', '.join(_EXAMPLES)}; or a GPU: "
        f"{', '.join(GPUS)}."
    )
