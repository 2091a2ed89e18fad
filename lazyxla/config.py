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

import dataclasses
import difflib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar, overload

from lazyxla import xla_options

PLUGINS = "lazyxla.plugins"

# The limit of PyTorch's type for device indices, int8_t.
MAX_DEVICES = 127

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Field(Generic[T]):
    """One setting: an attribute of :class:`Settings`, of the type of its default.

    ``doc`` is a clause of one line, in Markdown; ``details`` are sentences that go on. `make docs`
    writes the README's table from ``doc``, with a link to ``page``.
    """

    variable: str
    parse: Callable[[str], T]
    default: T
    doc: str
    details: str = ""
    page: str = ""
    name: str = dataclasses.field(default="", init=False)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, settings: None, owner: type) -> Field[T]: ...
    @overload
    def __get__(self, settings: Settings, owner: type) -> T: ...
    def __get__(self, settings: Settings | None, owner: type) -> Field[T] | T:
        # A value that was set is in the object's own dict, where Python looks first.
        return self if settings is None else self.default


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
    """A text that C++ and the operating system accept."""
    if "\0" in text:
        raise ValueError("expected text without NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text in UTF-8") from None
    return text


def _path(text: str) -> str:
    """A path that does not depend on the working directory; or nothing."""
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


class Settings:
    """The settings of this process. Each attribute is one; :data:`FIELDS` lists them.

    Assigning a value checks it as its variable is checked and raises ValueError if it is not
    allowed. ``on_change(name, value)`` callbacks hear of every assignment.
    """

    platform = Field(
        "LAZYXLA_PLATFORM",
        _platform,
        "auto",
        "where programs run: `cpu`, `cuda`, `tpu`, or `auto`, the first of TPU, GPU and CPU that "
        "there is",
        details="Or the name of another platform whose plugin is installed: an entry point of the "
        "group lazyxla.plugins.",
        page="docs/platforms.md",
    )
    plugin_path = Field(
        "LAZYXLA_PLUGIN_PATH",
        _path,
        "",
        "path of a PJRT plugin to use instead of the platform's own package",
        details="A shared library that exports GetPjrtApi. With platform=auto the platform is what "
        "the plugin calls itself.",
        page="docs/platforms.md#a-plugin-by-its-path",
    )
    create_options = Field(
        "LAZYXLA_CREATE_OPTIONS",
        _name_values,
        "",
        "options that the plugin starts its devices with: `name=value,name=value`",
        details="Which there are, the plugin knows.",
    )
    cpu_devices = Field(
        "LAZYXLA_CPU_DEVICES",
        _integer(1, MAX_DEVICES),
        1,
        "number of virtual devices of the CPU platform, 127 at most",
    )
    compare_collectives = Field(
        "LAZYXLA_COMPARE_COLLECTIVES",
        _one_of("first", "always", "never"),
        "first",
        "whether processes compare which collective or common program they are in: "
        "`first`, `always`, `never`",
        details="They do so before they exchange its data, so that all raise if they differ: "
        "always, never, or the first two times that one follows another. Counts for groups that "
        "are made later.",
        page="docs/distributed.md#when-something-goes-wrong",
    )
    strict_fallback = Field(
        "LAZYXLA_STRICT",
        _boolean,
        False,
        "makes an operator that only the host can run an error instead of a warning",
        page="docs/semantics.md#operators-on-the-host",
    )
    strict_host_calls = Field(
        "LAZYXLA_STRICT_HOST_CALLS",
        _boolean,
        False,
        "makes an operator that a program would call on the host an error",
        details="That is on the CPU platform only: what passes has operations of XLA's for "
        "everything, as on an accelerator.",
        page="docs/semantics.md#operators-on-the-host",
    )
    max_pending_nodes = Field(
        "LAZYXLA_MAX_PENDING",
        _integer(1),
        20000,
        "recorded operators after which a graph runs by itself",
        details="So a loop without a sync does not grow without limit.",
    )
    max_programs = Field(
        "LAZYXLA_MAX_PROGRAMS",
        _integer(1),
        2000,
        "compiled programs that are kept; then the ones not run for the longest time go",
        details="A program counts as one more for each hundred operators. It is a quarter of them "
        "that goes, to be compiled again if they are met again. So it is when the process has half "
        "of the memory mappings that Linux grants it: code takes mappings.",
    )
    max_calls = Field(
        "LAZYXLA_MAX_CALLS",
        _integer(1),
        50000,
        "kinds of calls that are remembered; then the ones not met for the longest time go",
        details="A kind is an operator with the dtypes and shapes it takes. It is a quarter of "
        "them that goes. Graphs with such a call are compiled again if they are met again, so this "
        "has to be more than a training step has.",
    )
    xla_options = Field(
        "LAZYXLA_XLA_OPTIONS",
        _name_values,
        "",
        "options of XLA's compiler for all programs: `name=value,name=value`",
        details="For example xla_cpu_enable_fast_math=true. Those of torch.compile and "
        "lazyxla.compile go before them.",
        page="docs/modes.md#torchcompile",
    )
    check_indices = Field(
        "LAZYXLA_CHECK_INDICES",
        _boolean,
        False,
        "makes indices out of range errors, as on PyTorch's CPU; slow",
        details="Every check waits for the device. Without it XLA clamps such indices where it "
        "reads, and leaves out what would be written there.",
        page="docs/semantics.md#values-that-are-data",
    )
    blocking = Field(
        "LAZYXLA_BLOCKING",
        _boolean,
        False,
        "waits for each program where it runs, which raises its errors there; slow, for debugging",
        details="In eager mode that is at the operator's call.",
        page="docs/modes.md#setting-the-mode",
    )
    cut_graphs = Field(
        "LAZYXLA_CUT_GRAPHS",
        _boolean,
        True,
        "runs a new graph that differs in few operators, or in sizes that are data, as several "
        "programs",
        details="What is as in graphs before is then compiled only once. Not in compiled regions.",
        page="docs/modes.md#graphs-that-are-cut",
    )
    host_programs = Field(
        "LAZYXLA_HOST_PROGRAMS",
        _boolean,
        True,
        "on the CPU, lets PyTorch's kernels run graphs that come seldom",
        details="In inference the first runs of any that is not large, in training those of a line "
        "whose graphs do not recur, in eager mode each operator's, instead of compiling them.",
        page="docs/modes.md#what-the-host-runs",
    )
    cache_dir = Field(
        "LAZYXLA_CACHE_DIR",
        _path,
        "",
        "directory of the on-disk caches; empty for `lazyxla` in the user's cache directory",
        details="They are of shapes and of compiled programs. The user's cache directory is "
        "XDG_CACHE_HOME or ~/.cache.",
        page="docs/performance.md#between-processes",
    )
    cache_size = Field(
        "LAZYXLA_CACHE_SIZE",
        _integer(0, 2**43 - 1),
        4096,
        "MiB of compiled programs that are kept on disk for later processes; `0` keeps none",
        details="Those not used for the longest time make room. With 0 none is looked for, either.",
        page="docs/performance.md#between-processes",
    )
    log_level = Field(
        "LAZYXLA_LOG",
        _one_of("debug", "info", "warning", "error"),
        "warning",
        "least level of messages shown: `debug`, `info`, `warning`, `error`",
        details="The messages are those of the Python logger named lazyxla.",
        page="docs/performance.md#find-recompilations",
    )

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
        """Calls ``listener(name, value)`` for every setting now and whenever one is assigned.

        Args:
            listener: a function of a setting's name and its value.
        """
        for field in FIELDS:
            listener(field.name, getattr(self, field.name))
        self._listeners.append(listener)

    def cache_directory(self) -> str:
        """The directory of the on-disk caches. It may not exist yet."""
        if self.cache_dir:
            return self.cache_dir
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # its specification says to ignore relative paths
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


FIELDS: tuple[Field[Any], ...] = tuple(
    field for field in vars(Settings).values() if isinstance(field, Field)
)
_FIELD_OF = {field.name: field for field in FIELDS}

settings = Settings()
