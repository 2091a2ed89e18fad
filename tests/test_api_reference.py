"""The API reference: it is built without a warning, and says what every parameter is."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lazyxla
from tests.conftest import ROOT
from tools import api_reference

# For people who write the compiler, not for users.
INTERNAL = {"lazyxla.lowering"}
# What the library makes and users read: its docstring says what it is, not what it is made of.
MADE_BY_US = {
    "CapturedProgram",
    "CompiledProgram",
    "Topology",
    "Field",
    "Plan",
    "Ranking",
    "Settings",
}


def callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All public functions, classes and methods, by their names."""
    for module in api_reference.modules():
        if module.__name__ in INTERNAL:
            continue
        for name, value in api_reference.public(module).items():
            if not getattr(value, "__module__", "").startswith("lazyxla"):
                continue  # a name of PyTorch's, such as Event
            if inspect.isclass(value):
                if name not in MADE_BY_US:
                    yield f"{module.__name__}.{name}", value
                for method, function in vars(value).items():
                    if inspect.isfunction(function) and not method.startswith("_"):
                        yield f"{module.__name__}.{name}.{method}", function
            elif inspect.isroutine(value):
                yield f"{module.__name__}.{name}", value


def described(doc: str) -> set[str]:
    """The names that the sections Args and Attributes of a docstring explain."""
    found: set[str] = set()
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n)+)", doc, re.MULTILINE):
        for names in re.findall(r"^    ([\w, *]+): ", section, re.MULTILINE):
            found |= {name.strip(" *") for name in names.split(",")}
    return found


def fields_with_docstrings(value: Any) -> set[str]:
    """The fields of a class that have a string below them."""
    if not inspect.isclass(value):
        return set()
    source = inspect.getsource(sys.modules[value.__module__])
    body = source.partition(f"\nclass {value.__name__}")[2].partition("\n\n\n")[0]
    return set(re.findall(r'^    (\w+): [^\n]+\n    """', body, re.MULTILINE))


def missing(value: Callable[..., Any]) -> list[str]:
    """The parameters that a docstring says nothing about."""
    known = described(inspect.getdoc(value) or "") | fields_with_docstrings(value) | {"self"}
    return [name for name in inspect.signature(value).parameters if name not in known]


def test_every_parameter_is_described() -> None:
    found = dict(callables())
    assert len(found) > 100
    assert [name for name, value in found.items() if not inspect.getdoc(value)] == []
    assert {name: lacks for name, value in found.items() if (lacks := missing(value))} == {}


def test_what_is_not_described_is_found() -> None:
    def function(a: int, b: int, *args: int, **kwargs: int) -> None:
        """Does something.

        Args:
            a: a number, or
                two: not a parameter.
            args, kwargs: more.
        """

    assert missing(function) == ["b"]


def test_counters_are_listed() -> None:
    doc = inspect.getdoc(lazyxla.counters) or ""
    listed = re.findall(r"``(\w+)``", " ".join(re.findall(r"^ *- (.*?):", doc, re.MULTILINE)))
    assert sorted(listed) == sorted(lazyxla.counters())


def test_counters_are_in_the_page_on_performance() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.partition("## Read the counters")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(lazyxla.counters())


def test_the_reference_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="needs pdoc, of the extra `docs`")
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tools.api_reference"]
    subprocess.run([*command, str(tmp_path)], check=True, cwd=ROOT)
    page = (tmp_path / "lazyxla.html").read_text()
    for name in set(lazyxla.__all__) - {"aot"}:
        assert f'id="{name}"' in page, name
    for name in ("lowering", "config", "device_module", "aot"):
        assert (tmp_path / "lazyxla" / f"{name}.html").exists()
