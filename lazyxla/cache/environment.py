"""What a compiled program depends on besides its graph, and how two such environments differ.

An environment is a text of lines "name: value". It is part of every key, and kept by itself, too:
it distinguishes a program that exists for another environment from one that does not exist at all.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from lazyxla import _C

_SHORT = 100  # characters. Of a value that is longer only the words that differ are named
_MOST_WORDS = 6


def environment(platform: str, topology: _C.Topology, lowering: dict[str, str]) -> str:
    """That of programs for the devices of a topology, lowered by what `lowering` names."""
    fields: dict[str, Any] = {
        "platform": platform,
        "device": topology.devices[0].kind,
        "platform version": topology.platform_version,
        "plugin": _library(topology),
    }
    if topology.platform_name == "cpu":
        fields["instruction sets"] = _instruction_sets()
    if topology.processes > 1:
        fields["processes"] = topology.processes
    options = topology.compile_options
    fields["compile options"] = " ".join(f"{name}={options[name]}" for name in sorted(options))
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        fields[name] = os.environ.get(name, "")
    fields.update(lowering)
    return "".join(f"{name}: {' '.join(str(value).split())}\n" for name, value in fields.items())


def _library(topology: _C.Topology) -> str:
    """The plugin. Some report no version: another build is most likely of another size."""
    path, (major, minor), xla, stablehlo = topology.plugin
    text = f"PJRT {major}.{minor}, XLA {xla or 0}"
    if stablehlo:
        text += f", StableHLO {'.'.join(map(str, stablehlo))}"
    try:
        return f"{text}, {os.path.getsize(path)} bytes"
    except OSError:
        return text


def processor() -> str:
    """The CPU's name, as far as it has one, and its features."""
    return f"{_of_cpu('model name')}, {_instruction_sets()}"


def _instruction_sets() -> str:
    """The CPU's features, as Linux reports them: code compiled for one may not run on another."""
    return _of_cpu("flags", "Features")


def _of_cpu(*names: str) -> str:
    """What Linux reports of the first CPU by one of these names."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""


def count_differences(theirs: str, ours: str) -> int:
    """How many fields differ between two environments."""
    return len(_compare(theirs, ours))


def differences(theirs: str, ours: str) -> str:
    """Which ones, in words: "torch 2.12.0 instead of 2.13.0, XLA_FLAGS none instead of ..."."""
    return ", ".join(_in_words(*difference) for difference in _compare(theirs, ours))


def _compare(theirs: str, ours: str) -> list[tuple[str, str, str]]:
    """Of each field that differs: its name, their value, ours."""
    their_fields, our_fields = _parse(theirs), _parse(ours)
    return [
        (name, their_fields.get(name, ""), our_fields.get(name, ""))
        for name in our_fields | their_fields
        if their_fields.get(name) != our_fields.get(name)
    ]


def _parse(text: str) -> dict[str, str]:
    lines = (line.partition(": ") for line in text.splitlines())
    return {name: value for name, _, value in lines}


def _in_words(name: str, theirs: str, ours: str) -> str:
    if max(len(theirs), len(ours)) > _SHORT:
        theirs, ours = _own_words(theirs, ours), _own_words(ours, theirs)
    return f"{name} {theirs or 'none'} instead of {ours or 'none'}"


def _own_words(text: str, other: str) -> str:
    """The words that only `text` has, as far as they are few."""
    others = set(other.split())
    words = [word for word in text.split() if word not in others]
    return " ".join(words[:_MOST_WORDS] + ["..."] * (len(words) > _MOST_WORDS))
