"""The pages: snippets run as they stand, links lead somewhere, the table of locks is complete.

The snippets of a section run in order in one process, those of some pages all together. What they
take from the reader's program stands in a comment of the page, which runs in its place:

    <!-- run: loader = [torch.ones(3)] -->
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

import lazyxla
from tests.conftest import ROOT, RunPython
from tests.support import needs_libtpu

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Snippets go on from section to section.
WHOLE = {"docs/README.md", "custom_operators.md", "jax.md", "scaling.md"}
# By tests/aot/test_aot_compile.py, with smaller numbers.
ELSEWHERE = {"aot.md"}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```python\n(.*?)^```$|^<!-- run:\s(.*?)-->$", re.MULTILINE | re.DOTALL)


def label(page: Path) -> str:
    return "docs/README.md" if page == ROOT / "docs" / "README.md" else page.name


def without_code(text: str) -> str:
    """The page with its blocks of code blanked, at the same positions."""
    return FENCE.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)


def sections(text: str) -> dict[str, str]:
    """A page's sections of the first two levels, by their titles."""
    titles = list(re.finditer(r"^##? (.*)$", without_code(text), re.MULTILINE))
    ends = [title.start() for title in titles[1:]] + [len(text)]
    return {title[1]: text[title.end() : end] for title, end in zip(titles, ends, strict=True)}


def code_of(text: str) -> str:
    return "\n".join(match[1] or match[2] for match in CODE.finditer(text))


def snippets() -> list[Any]:
    """A parameter for each page, or section, that has any."""
    found = []
    for page in PAGES:
        if label(page) in ELSEWHERE:
            continue
        text = page.read_text()
        parts = {"": text} if label(page) in WHOLE else sections(text)
        marks = [needs_libtpu] if page.name == "scaling.md" else []
        found += [
            pytest.param(code_of(part), id=f"{label(page)}-{title}", marks=marks)
            for title, part in parts.items()
            if "```python\n" in part
        ]
    return found


@pytest.mark.parametrize("code", snippets())
def test_snippets(code: str, run_python: RunPython) -> None:
    run_python(code, LAZYXLA_CPU_DEVICES="4")


def test_sections_are_split_at_headings_alone() -> None:
    text = "# A\nintro\n```sh\n# no heading\n```\n## B\n### C\n<!-- run: x = 1\ny = 2 -->\n"
    text += "```python\nprint(x)\n```\n```py\nnot run\n```\n"
    assert list(sections(text)) == ["A", "B"]
    assert code_of(sections(text)["A"]) == ""
    assert code_of(sections(text)["B"]) == "x = 1\ny = 2 \nprint(x)\n"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_what_is_not_run_says_why(page: Path) -> None:
    text = page.read_text()
    languages = {block[1] for block in FENCE.finditer(text)}
    assert languages <= {"", "python", "py", "sh", "toml"}
    unexplained = re.findall(r"(?<! -->\n)^```py\n", text, re.MULTILINE)
    assert not unexplained, "a snippet that does not run follows <!-- not run: why -->"


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead


@pytest.mark.parametrize("name", ["design.md", "contributing.md"])
def test_files_that_are_named_exist(name: str) -> None:
    """Folders by their path; files by their path or, where it is clear which, by their name."""
    text = (ROOT / "docs" / name).read_text()
    roots = ("csrc", "lazyxla", "tests", "benchmarks", "examples")
    files = [str(p.relative_to(ROOT)) for root in roots for p in (ROOT / root).rglob("*.*")]
    named = set(re.findall(r"(?<![\w*.])[\w/]+\.(?:cpp|h|py)\b(?!:)", text)) - {"train.py"}
    folders = set(re.findall(r"`((?:csrc|lazyxla|tests)/(?:\w+/)*)`", text))
    assert len(named) > 5
    assert [n for n in sorted(named) if not any(f"/{f}".endswith(f"/{n}") for f in files)] == []
    assert [n for n in sorted(folders) if not (ROOT / n).is_dir()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/README.md"])
def test_functions_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    commands = set(re.findall(r"python -m (lazyxla[\w.]*)", text))
    found = set(re.findall(r"(?<!-m )\blazyxla((?:\.[A-Za-z_]\w*)+)", text))
    missing = [name for name in commands if importlib.util.find_spec(name) is None]
    for names in sorted(found):
        value: Any = lazyxla
        for name in names[1:].split("."):
            value = getattr(value, name, None)
        if value is None:
            missing.append(names)
    assert len(found) > 10
    assert not missing


LOCK = re.compile(
    r"^\s*(?:static |mutable |constinit )*OrderedMutex \w+;|new OrderedMutex"
    r"|(?<!, )\bSpinLock(?: \w+;|,|>)|threading\.(?:R?Lock|Condition)\(",
    re.MULTILINE,
)


def test_locks_are_listed() -> None:
    """Each file that has a lock with an order is in the table of that order."""
    table = sections((ROOT / "docs" / "design.md").read_text())["Locks"]
    rows = "\n".join(re.findall(r"^\|.*", table, re.MULTILINE))
    listed = set(re.findall(r"(?:csrc|lazyxla)/[\w/]+\.(?:h|cpp|py)", rows))
    files = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "lazyxla").rglob("*.py")]
    sources = [path for path in files if LOCK.search(path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in sources} == listed


def test_other_locks_are_guarded_values() -> None:
    """Of the standard's locks only those that csrc/common/locks.h makes ours from are used."""
    lock = re.compile(r"std::(?:\w*mutex|once_flag|counting_semaphore|binary_semaphore)\b")
    files = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    found = [path for path in files if lock.search(path.read_text())]
    assert [str(path.relative_to(ROOT)) for path in found] == ["csrc/common/locks.h"]
