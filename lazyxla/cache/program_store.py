"""Compiled programs on disk, so that the next process compiles nothing.

Two kinds of entries (entries.py), each found by all that it depends on:

=======  ======================================  ==================================================
kind     key                                     bytes
=======  ======================================  ==================================================
program  StableHLO, compile options,             the serialized executable
         environment
graph    portable key, compile options,          its forms: which scalars are inputs, the others'
         environment                             values, and the program of each, by its entry's
                                                 name
=======  ======================================  ==================================================

With its graph known a program is loaded without lowering it; with its program known (a loop of
`scan_layers`, an operator with a user's rule) it is lowered, but not compiled. Another
environment (environment.py) finds nothing: of lazyxla's lowering, of torch, whose decompositions
are part of it, of JAX, of the plugin.

A form serves a graph if the scalars that are no inputs have the graph's values. Which of them are
inputs is a guess when a graph is new to the process (csrc/program/scalars.h), from what ran before;
any form that serves is then good, whichever process made it. So programs that were compiled without
what a process runs before them, by a capture for example, are found, too.

Scalars are 64-bit words, `slots`: integers, or the bits of a float64. `wanted`, `needed` and
`variable` have a bool for each.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from lazyxla import _C, lowering
from lazyxla.cache import entries, files
from lazyxla.cache.entries import Entries, Key
from lazyxla.cache.environment import count_differences, differences, environment
from lazyxla.config import settings
from lazyxla.lowering.cpu import kernel_limits

_MOST_FORMS = 64
_MOST_ENVIRONMENTS = 16  # that a miss is explained by


class Form(NamedTuple):
    """A program of a graph: another one has other inputs, constants or static scalars."""

    variable: list[bool]
    static_slots: list[int]
    constants: list[int]  # of the scalars that are no inputs
    program: str  # the name of its entry

    @classmethod
    def parse(cls, line: bytes) -> Form | None:
        """One that was written as a line of JSON; None if it is none."""
        try:
            variable, static_slots, constants, program = json.loads(line)
            return cls(
                [bool(is_input) for is_input in variable],
                [range(len(variable))[slot] for slot in static_slots],
                [int(word) for word in constants],
                str(program),
            )
        except (ValueError, TypeError, IndexError):
            return None

    def serves(self, needed: Sequence[bool], slots: Sequence[int]) -> bool:
        """Whether it can be run with these scalars, the `needed` ones as inputs if they can be."""
        return (
            len(self.variable) == len(slots)
            and self.constants == _constants(self.variable, slots)
            and all(
                is_input or i in self.static_slots
                for i, is_input in enumerate(self.variable)
                if needed[i]
            )
        )


class Found(NamedTuple):
    """The program of a graph, to be run."""

    executable: bytes
    variable: list[bool]
    static_slots: list[int]


class ProgramStore:
    """The programs of a directory that run in an environment.

    Args:
        directory: one that :func:`files.prepare_directory` takes.
        max_bytes: of all that is kept there.
        environment: of the programs in question.
        lowering_is_known: whether the environment says all that a lowering depends on; else only
            programs are looked up.
        on_error: called where something cannot be written.
    """

    def __init__(
        self,
        directory: str,
        max_bytes: int,
        environment: str,
        lowering_is_known: bool,
        on_error: Callable[[str, OSError], None] = files.warn_not_kept,
    ) -> None:
        self.entries = Entries(directory, max_bytes)
        self.environment = environment.encode()
        self.lowering_is_known = lowering_is_known
        self._on_error = on_error
        self._environment_is_kept = False
        self._nothing_is_ours = False

    def graph(self, key: bytes | None, options: bytes) -> StoredGraph:
        """What is kept of a graph.

        Args:
            key: its portable key (csrc/program/graph.h); None if it means something in this
                process only.
            options: what it is compiled with, as PJRT takes it.
        """
        return StoredGraph(self, key if self.lowering_is_known else None, options)

    def keep(self, key: Key, content: bytes) -> None:
        """Writes an entry, and once that of the environment."""
        try:
            if not self._environment_is_kept:
                self._environment_is_kept = True
                ours = entries.key("environment", self.environment)
                if self.entries.read(ours) is None:
                    self.entries.write(ours, b"")
            self.entries.write(key, content)
        except OSError as error:
            self._on_error(self.entries.directory, error)

    @functools.cached_property
    def other_environments(self) -> list[str]:
        """The environments that programs are kept for, except ours; the most similar first."""
        kept = list(self.entries.texts("environment"))
        self._nothing_is_ours = self.environment not in kept
        others = [text.decode() for text in kept if text != self.environment]
        ours = self.environment.decode()
        return sorted(others[:_MOST_ENVIRONMENTS], key=lambda text: count_differences(text, ours))

    def takes_nothing_as_ours(self) -> bool:
        """Whether all programs are for other environments; once, then False."""
        self._nothing_is_ours, nothing = False, self._nothing_is_ours
        return nothing


class StoredGraph:
    """What a store keeps of one graph."""

    def __init__(self, store: ProgramStore, key: bytes | None, options: bytes) -> None:
        self._store = store
        self._options = options
        self._key = None
        if key is not None:
            self._text = _text(key, options)
            self._key = entries.key("graph", self._text + store.environment)

    def is_kept(self) -> bool:
        """Whether a program of it is kept, for any scalars."""
        return any(self._store.entries.contains(form.program) for form in self._forms())

    def find(
        self, wanted: Sequence[bool], needed: Sequence[bool], slots: Sequence[int]
    ) -> Found | None:
        """The program for these scalars, of which the `needed` ones must be its inputs if they can.

        If several serve, it is one whose inputs are exactly the `wanted` ones; else one with the
        most.
        """
        serving = [form for form in self._forms() if form.serves(needed, slots)]
        if not serving:
            return None
        best = max(
            serving,
            key=lambda form: (
                form.variable == _without(wanted, form.static_slots),
                sum(form.variable),
            ),
        )
        executable = self._store.entries.read_named(best.program)
        return Found(executable, best.variable, best.static_slots) if executable else None

    def explain_miss(self) -> str:
        """Why a graph that is new to the process was not found, as the end of a sentence.

        It is there for other numbers, or for another environment; else this is empty. That nothing
        at all is for this environment is said once.
        """
        others = self._store.other_environments
        nothing_is_ours = self._store.takes_nothing_as_ours()
        if self.is_kept():
            return f"; it is kept in {self._store.entries.directory} for other numbers"
        for other in others if self._key else ():
            if self._store.entries.contains(entries.key("graph", self._text + other.encode()).name):
                return self._explain("it is kept", other)
        return self._explain("all programs are", others[0]) if others and nothing_is_ours else ""

    def _explain(self, whose: str, other: str) -> str:
        ours = self._store.environment.decode()
        directory = self._store.entries.directory
        return f"; {whose} in {directory} for another environment: {differences(other, ours)}"

    def add(
        self,
        wanted: Sequence[bool],
        slots: Sequence[int],
        static_slots: Sequence[int],
        artifact: bytes,
    ) -> tuple[bytes | None, Callable[[bytes], None]]:
        """Keeps that it is the program of an artifact.

        Args:
            wanted: the requested inputs; static ones among them are no inputs.
            artifact: what it was lowered to, StableHLO.

        Returns:
            the serialized executable, None if it is not kept yet; and what keeps it.
        """
        text = _text(artifact, self._options) + self._store.environment
        program = entries.key("program", text)
        if self._key:
            variable = _without(wanted, static_slots)
            constants = _constants(variable, slots)
            form = Form(variable, list(static_slots), constants, program.name)
            others = [other for other in self._forms() if other[:3] != form[:3]]
            lines = [json.dumps(each) for each in [form, *others][:_MOST_FORMS]]
            self._store.keep(self._key, "\n".join(lines).encode())
        return self._store.entries.read(program), functools.partial(self._store.keep, program)

    def _forms(self) -> list[Form]:
        content = self._store.entries.read(self._key) if self._key else None
        forms = map(Form.parse, (content or b"").splitlines())
        return [form for form in forms if form]


def _text(subject: bytes, options: bytes) -> bytes:
    """The begin of a key's text: different arguments never give the same bytes."""
    return b"".join(struct.pack("<Q", len(part)) + part for part in (subject, options))


def _constants(variable: Sequence[bool], slots: Sequence[int]) -> list[int]:
    return [slot for slot, is_input in zip(slots, variable, strict=True) if not is_input]


def _without(variable: Sequence[bool], static_slots: Sequence[int]) -> list[bool]:
    static = set(static_slots)
    return [is_input and i not in static for i, is_input in enumerate(variable)]


@functools.cache
def current() -> ProgramStore | None:
    """That of the programs that run here; None if none are kept."""
    directory = _programs(settings.cache_directory())
    if not settings.cache_size or not _is_usable(directory):
        return None
    return _open(directory, _C.platform(), _C.Topology.of_client())


def forget() -> None:
    """Something that :func:`current` depends on has changed."""
    current.cache_clear()


def stored_graph(key: bytes | None, options: bytes) -> StoredGraph | None:
    """What is kept of a graph that runs here (:meth:`ProgramStore.graph`). For C++."""
    store = current()
    return store.graph(key, options) if store else None


def for_others(
    cache_directory: str | os.PathLike[str] | None, platform: str, topology: _C.Topology
) -> ProgramStore:
    """A store of programs for the devices of a topology, which does not leave it at a warning.

    Args:
        cache_directory: None is that of the settings.

    Raises:
        ValueError: the settings say that no programs are kept.
        OSError: there is no such directory, and none can be made; or others can write to it.
    """
    if not settings.cache_size:
        raise ValueError(
            "compiled programs are to be kept, but LAZYXLA_CACHE_SIZE (setting cache_size) is 0"
        )
    cache = os.path.abspath(os.fspath(cache_directory or settings.cache_directory()))
    for directory in (cache, _programs(cache)):
        files.prepare_directory(directory)
    return _open(_programs(cache), platform, topology, on_error=_raise)


def _raise(directory: str, error: OSError) -> NoReturn:
    raise OSError(error.errno, f"the program cannot be kept: {error.strerror}", directory)


def _is_usable(directory: str) -> bool:
    for path in (os.path.dirname(directory), directory):
        try:
            files.prepare_directory(path)
        except files.WritableByOthers as error:
            files.warn_of_others(error)
            return False
        except OSError as error:
            files.warn_not_kept(path, error)
            return False
    return True


def _open(
    directory: str,
    platform: str,
    topology: _C.Topology,
    on_error: Callable[[str, OSError], None] = files.warn_not_kept,
) -> ProgramStore:
    # In strict mode a program that calls the host is an error, which a stored one would not raise.
    version = {**_lowering_version(), "strict host calls": str(settings.strict_host_calls)}
    if topology.platform_name == "cpu":
        version["kernels"] = kernel_limits.describe()
    text = environment(platform, topology, version)
    # A user's rule is not identified by its name.
    known = not lowering.has_user_rules()
    return ProgramStore(directory, settings.cache_size << 20, text, known, on_error)


def _programs(cache_directory: str) -> str:
    return os.path.join(cache_directory, "programs")


@functools.cache
def _lowering_version() -> dict[str, str]:
    """A checksum of the sources of the lowering, and the versions of what it is built on."""
    checksum = hashlib.sha256()
    package = Path(__file__).parent.parent
    for path in sorted(package.glob("lowering/**/*.py")):
        checksum.update(str(path.relative_to(package)).encode() + b"\0")
        checksum.update(path.read_bytes() + b"\0")
    return {
        "lowering": checksum.hexdigest(),
        "torch": _public_version(torch.__version__),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
    }


def _public_version(version: str) -> str:
    """Without the part that distinguishes wheels of one version, which differ in kernels only."""
    return re.sub(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", "", version)
