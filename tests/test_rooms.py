"""The rooms of csrc/: which may include which, and how long a file may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"

BASE = {"ir", "common"}
MAY_INCLUDE = {
    "common": set[str](),
    "ir": {"common"},
    "pjrt": {"common"},
    "program": {"pjrt"} | BASE,
    "graph": {"program", "pjrt"} | BASE,
    "record": {"graph", "program", "pjrt"} | BASE,
    "dispatch": {"record", "graph", "program"} | BASE,
    "distributed": {"dispatch", "record", "graph", "program"} | BASE,
    "steps": {"dispatch", "record", "graph", "program"} | BASE,
    "bindings": {"steps", "distributed", "dispatch", "record", "graph", "program", "pjrt"} | BASE,
}
"""Per room, the others that its files may include, each after those. Arrows go one way, from the
recorder down to the plugin. The recorder itself speaks to no plugin."""

NAMESPACES = {
    "common": "lazyxla",  # for all rooms, which use it without a prefix
    "common/compat.h": "lazyxla::compat",  # a version of torch or JAX shows where it is asked for
    "common/waiting.h": "lazyxla::waiting",  # its functions' names are too short to stand alone
    "common/waiting.cpp": "lazyxla::waiting",
}
"""The namespace of a room, or of a file, where it is not that of the room's name: why."""

TORCHS = {
    "dispatch/attention.cpp": "at::native",  # torch's macro expects to be used there
    "dispatch/sparse_intersection.cpp": "at::native",  # the same
    "record/recording.cpp": "torch::autograd",  # declares what torch exports, but has in no header
}
"""Where a file opens a namespace of torch besides its own: why."""

MACROS = {"common/element_types.h"}
"""Files with macros alone, which no namespace has."""

LONGEST = 400
CORE = 11_000
"""Lines of the files on an operator's path, which a newcomer reads first."""


def sources() -> list[Path]:
    return [path for path in sorted(CSRC.rglob("*")) if path.suffix in (".h", ".cpp")]


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)


def test_every_file_is_in_a_room() -> None:
    assert {path.parent for path in sources()} == {CSRC / room for room in MAY_INCLUDE}


def test_includes_are_named_by_their_rooms() -> None:
    """So that the next test sees all of them."""
    unknown = [
        (str(p), name) for p in sources() for name in includes(p) if not (CSRC / name).exists()
    ]
    assert unknown == []


@pytest.mark.parametrize("room", MAY_INCLUDE)
def test_a_room_includes_only_what_is_below_it(room: str) -> None:
    files = [path for path in sources() if path.parent.name == room]
    found = {name.split("/")[0] for path in files for name in includes(path)} - {room}
    assert files
    assert found - MAY_INCLUDE[room] == set()


def test_a_namespace_is_that_of_its_room() -> None:
    """Those within it, without `::` in their names, are free."""
    found = {
        str(path.relative_to(CSRC)): set(
            re.findall(r"^namespace (lazyxla|\w+::[\w:]+) \{", path.read_text(), re.MULTILINE)
        )
        for path in sources()
    }
    expected = {}
    for name in found:
        room = name.split("/")[0]
        own = NAMESPACES.get(name, NAMESPACES.get(room, f"lazyxla::{room}"))
        expected[name] = {own, TORCHS[name]} if name in TORCHS else {own}
        if name in MACROS:
            expected[name] = set()
    assert found == expected


def test_the_rooms_have_an_order() -> None:
    """No room may include, through whatever others, one that may include it."""
    rooms = list(MAY_INCLUDE)
    assert all(others <= set(rooms[: rooms.index(room)]) for room, others in MAY_INCLUDE.items())


def test_the_client_of_plugins_knows_nothing_of_torch() -> None:
    headers = r"^#include <(?:torch|ATen|c10|pybind11)/"
    files = [path for path in sources() if path.parent.name == "pjrt"]
    assert [path.name for path in files if re.search(headers, path.read_text(), re.MULTILINE)] == []


def test_files_are_short() -> None:
    python = [
        p for root in ("lazyxla", "benchmarks", "examples") for p in (ROOT / root).rglob("*.py")
    ]
    long = [
        str(path.relative_to(ROOT))
        for path in [*sources(), *python]
        if len(path.read_text().splitlines()) > LONGEST
    ]
    assert long == []


def modules() -> dict[str, list[Path]]:
    """The files of csrc/ by what they have in common: "ir/node" is a header and a source."""
    found: dict[str, list[Path]] = {}
    for path in sources():
        found.setdefault(str(path.relative_to(CSRC).with_suffix("")), []).append(path)
    return found


def path_of_an_operator() -> set[str]:
    """The modules in the picture of docs/design.md, where a line names a room or files of it."""
    picture = (ROOT / "docs" / "design.md").read_text().split("```")[1]
    found, room = set(), Path()
    for line in picture.splitlines():
        if heading := re.search(r"csrc/(\w+)/", line):
            room = CSRC / heading[1]
        for name in re.findall(r"[\w./]+\.(?:h|cpp)\b", line):
            path = CSRC / name.removeprefix("csrc/") if name.startswith("csrc/") else room / name
            assert path.exists(), name
            found.add(str(path.resolve().relative_to(CSRC).with_suffix("")))
    return found


def beside_the_path() -> list[str]:
    """The modules in the table "What to read" of docs/design.md."""
    section = (ROOT / "docs" / "design.md").read_text().split("### What to read")[1]
    found = []
    for row in re.findall(r"^\| .* \| (`.*) \|$", section.split("\n## ")[0], re.MULTILINE):
        for names in row.split(";"):
            room = ""
            for name in re.findall(r"`([^`]+)`", names):
                room, _, module = name.rpartition("/") if "/" in name else (room, "", name)
                found.append(f"{room}/{module}")
    return found


def test_the_design_says_where_each_file_belongs() -> None:
    named = [*path_of_an_operator(), *beside_the_path()]
    assert sorted(named) == sorted(modules())


def test_an_operator_s_path_is_read_in_an_afternoon() -> None:
    lines = sum(
        len(path.read_text().splitlines())
        for name in path_of_an_operator()
        for path in modules()[name]
    )
    assert CORE * 0.8 < lines < CORE, lines
