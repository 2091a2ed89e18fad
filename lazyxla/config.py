"""All settings of lazyxla: their names, types, defaults and meaning.

This is the only module that reads ``LAZYXLA_*`` environment variables. Each setting is a field of
the one object :data:`settings`; its variable, if set, gives the value at import, and a program may
assign another later::

    import lazyxla
    lazyxla.settings.strict_fallback = True

Settings about devices (``platform``, ``plugin_path``, ``cpu_devices``) count until the first use
of a device, which starts the plugin.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lazyxla import xla_options

PLUGINS = "lazyxla.plugins"

# As many as PyTorch's type for their numbers, int8_t, has.
MAX_DEVICES = 127

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True)
class Field:
    """One setting: its variable, how its text is read, its default and what it does."""

    name: str
    variable: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError(f"expected one of {', '.join(_TRUE + _FALSE)}")


def _integer(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text, 16 if "0x" in text else 10)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise ValueError(f"expected an integer of at least {least} and at most {most}")
        return value

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"expected one of {', '.join(words)}")
        return word

    return parse


def _text(text: str) -> str:
    """What C++ and the operating system take."""
    if "\0" in text:
        raise ValueError("expected text without NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text in UTF-8") from None
    return text


def _path(text: str) -> str:
    """A path that stays the same when the process goes to another directory; or nothing."""
    if text and not _text(text).strip():
        raise ValueError("expected a path or nothing, found blanks")
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def _name_values(text: str) -> str:
    xla_options.parse(_text(text))
    return text


def _platform(text: str) -> str:
    known = ("auto", "cpu", "cuda", "tpu")
    if text.strip().lower() in known:
        return text.strip().lower()
    return _one_of(*known, *plugins())(text)


def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """The installed plugins of other platforms: entry points of the group lazyxla.plugins.

    An entry point's name is the platform's. It is a function without arguments that returns the
    path of the plugin, a shared library that exports GetPjrtApi, or that path and a dict of the
    options to start its devices with.
    """
    return {point.name: point for point in importlib.metadata.entry_points(group=PLUGINS)}


FIELDS: tuple[Field, ...] = (
    Field(
        "platform",
        "LAZYXLA_PLATFORM",
        _platform,
        "auto",
        "Where programs run: cpu, cuda, tpu, or auto, which takes a TPU if one is attached, then "
        "an NVIDIA GPU, then the CPU. Or the name of another platform whose plugin is installed: "
        "an entry point of the group lazyxla.plugins.",
    ),
    Field(
        "plugin_path",
        "LAZYXLA_PLUGIN_PATH",
        _path,
        "",
        "Path of a PJRT plugin (a shared library that exports GetPjrtApi) to use instead of the "
        "platform's own package. With platform=auto the platform is what the plugin calls itself.",
    ),
    Field(
        "create_options",
        "LAZYXLA_CREATE_OPTIONS",
        _name_values,
        "",
        "Options that the plugin's devices are started with, as name=value,name=value; which there "
        "are, the plugin knows.",
    ),
    Field(
        "cpu_devices",
        "LAZYXLA_CPU_DEVICES",
        _integer(1, MAX_DEVICES),
        1,
        "How many virtual devices the CPU platform has, 127 at most.",
    ),
    Field(
        "compare_collectives",
        "LAZYXLA_COMPARE_COLLECTIVES",
        _one_of("first", "always", "never"),
        "first",
        "Whether the processes of a group tell one another which collective they are in before "
        "they exchange its data, so that all raise if they differ: always, never, or the first two "
        "times that one follows another. Counts for groups that are made later.",
    ),
    Field(
        "strict_fallback",
        "LAZYXLA_STRICT",
        _boolean,
        False,
        "Makes an operator that only the host can run an error instead of a warning.",
    ),
    Field(
        "strict_host_calls",
        "LAZYXLA_STRICT_HOST_CALLS",
        _boolean,
        False,
        "Makes an operator that the program would call on the host (on the CPU platform only) an "
        "error: what passes has operations of XLA's for everything, as on an accelerator.",
    ),
    Field(
        "max_pending_nodes",
        "LAZYXLA_MAX_PENDING",
        _integer(1),
        20000,
        "Runs the recorded graph by itself once it has this many nodes, so that a loop without a "
        "sync does not grow without limit.",
    ),
    Field(
        "max_programs",
        "LAZYXLA_MAX_PROGRAMS",
        _integer(1),
        2000,
        "How many compiled programs are kept. When there are more, the quarter that has not run "
        "for the longest time is dropped, and compiled again if it is met again. So it is when "
        "the process has half of the memory mappings that Linux grants it: code takes mappings.",
    ),
    Field(
        "max_calls",
        "LAZYXLA_MAX_CALLS",
        _integer(1),
        50000,
        "How many kinds of calls are remembered: operators with the dtypes and shapes they take. "
        "When there are more, the quarter that was not met for the longest time is forgotten. "
        "Graphs with such a call are compiled again if they are met again, so this has to be more "
        "than a training step has.",
    ),
    Field(
        "xla_options",
        "LAZYXLA_XLA_OPTIONS",
        _name_values,
        "",
        "Options of XLA's compiler for all programs, as name=value,name=value, for example "
        "xla_cpu_enable_fast_math=true. Those of torch.compile and lazyxla.compile go before them.",
    ),
    Field(
        "check_indices",
        "LAZYXLA_CHECK_INDICES",
        _boolean,
        False,
        "Checks the indices of indexing operators on the host, for PyTorch's out-of-range errors. "
        "Slow: every check waits for the device. Without it XLA clamps such indices "
        "where it reads, and leaves out what would be written there.",
    ),
    Field(
        "blocking",
        "LAZYXLA_BLOCKING",
        _boolean,
        False,
        "Waits for every program where it is run, so that an error of its execution is raised "
        "there: in eager mode at the operator's call. Slow; for debugging.",
    ),
    Field(
        "cut_graphs",
        "LAZYXLA_CUT_GRAPHS",
        _boolean,
        True,
        "Runs a new graph that differs from one before in few operators as several programs, so "
        "that the large part, which is the same, is compiled only once. Not in compiled regions.",
    ),
    Field(
        "host_programs",
        "LAZYXLA_HOST_PROGRAMS",
        _boolean,
        True,
        "On the CPU platform, has PyTorch's own kernels run small graphs that stay new, and in "
        "inference the first runs of any that is not large, instead of compiling them. In lazy "
        "mode only.",
    ),
    Field(
        "cache_dir",
        "LAZYXLA_CACHE_DIR",
        _path,
        "",
        "Directory of the on-disk caches (of shapes and of compiled programs); empty for lazyxla "
        "under the user's cache directory (XDG_CACHE_HOME or ~/.cache).",
    ),
    Field(
        "cache_size",
        "LAZYXLA_CACHE_SIZE",
        _integer(0, 2**43 - 1),
        4096,
        "How many MiB of compiled programs are kept on disk for later processes; those not used "
        "for the longest time make room. 0 keeps none, and looks for none.",
    ),
    Field(
        "log_level",
        "LAZYXLA_LOG",
        _one_of("debug", "info", "warning", "error"),
        "warning",
        "Least level of the messages that the Python logger named lazyxla shows: debug, info, "
        "warning or error.",
    ),
)

_FIELD_OF = {field.name: field for field in FIELDS}


class Settings:
    """The settings of this process; see :data:`FIELDS` for each one's meaning.

    Assigning a value checks it as its variable is checked and raises ValueError if it is not
    allowed. ``on_change(name, value)`` callbacks hear of every assignment.
    """

    platform: str
    create_options: str
    plugin_path: str
    cpu_devices: int
    strict_fallback: bool
    strict_host_calls: bool
    max_pending_nodes: int
    max_programs: int
    max_calls: int
    xla_options: str
    check_indices: bool
    compare_collectives: str
    blocking: bool
    cut_graphs: bool
    host_programs: bool
    cache_dir: str
    cache_size: int
    log_level: str

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        object.__setattr__(self, "_listeners", [])
        for field in FIELDS:
            value = field.default
            if field.variable in environment:
                text = environment[field.variable]
                try:
                    value = field.parse(text)
                except ValueError as error:
                    raise ValueError(f"{field.variable}={_shown(text)}: {error}") from None
            object.__setattr__(self, field.name, value)
        _warn_of_unknown(environment)

    def __setattr__(self, name: str, value: Any) -> None:
        field = _FIELD_OF.get(name)
        if field is None:
            raise AttributeError(f"lazyxla has no setting {name!r}{_did_you_mean(name, _FIELD_OF)}")
        kind = type(field.default)
        # An int is no bool, a bool no int: both are mistakes here.
        if type(value) is not kind:
            raise ValueError(f"setting {name} is a {kind.__name__}, got {_shown(value)}")
        try:
            # In hexadecimal, for Python writes no large number in decimal.
            value = field.parse(hex(value) if kind is int else str(value))
        except ValueError as error:
            raise ValueError(f"setting {name} = {_shown(value)}: {error}") from None
        before = getattr(self, name)
        object.__setattr__(self, name, value)
        try:
            for listener in self._listeners:
                listener(name, value)
        except BaseException:
            object.__setattr__(self, name, before)
            raise

    def on_change(self, listener: Callable[[str, Any], None]) -> None:
        """Calls ``listener(name, value)`` for every setting now and whenever one is assigned."""
        for field in FIELDS:
            listener(field.name, getattr(self, field.name))
        self._listeners.append(listener)

    def cache_directory(self) -> str:
        """The directory of the on-disk caches. It may not exist yet."""
        if self.cache_dir:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # such a one is to be ignored, says its specification
            base = os.path.join(os.path.expanduser("~"), ".cache")
        return os.path.join(base, "lazyxla")

    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in FIELDS)
        return f"Settings({values})"

    _listeners: list[Callable[[str, Any], None]]


def _shown(value: object) -> str:
    """A value as messages show it: not all of a long one."""
    try:
        text = repr(value)
    except Exception:  # of an integer of too many digits, or of an object that has no good one
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= 100 else f"{text[:100]}..."


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _warn_of_unknown(environment: Mapping[str, str]) -> None:
    known: dict[str, object] = {field.variable: field for field in FIELDS}
    for name in sorted(environment):
        if name.startswith("LAZYXLA_") and name not in known:
            warnings.warn(
                f"{name} is not a setting of lazyxla and is ignored{_did_you_mean(name, known)}",
                stacklevel=4,
            )


settings = Settings()
