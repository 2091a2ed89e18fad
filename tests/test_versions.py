"""Versions of torch, JAX and Python: one place in Python and one in C++ knows them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from lazyxla import compat
from tests.conftest import ROOT
from tools import copy_sources, wheel_metadata

# What asks for a version in order to choose by it; names in a key or a message do not.
ASKS = re.compile(
    r"TORCH_VERSION_M|XLA_FFI_API_M|PY_VERSION_HEX|PY_MINOR_VERSION"
    r"|\bversion_info\b|\bpython_version\(|\bversion\.parse\b|\bVersion\("
    r"|(?:torch|jax|jaxlib|numpy|np)\.(?:version\.)?__version__(?:_info__)?\s*(?:[<>]|[!=]=|\.split|\[)"
)
PLACES = {"lazyxla/compat.py", "csrc/common/compat.h"}


def test_nobody_else_asks_for_a_version() -> None:
    files = [*(ROOT / "lazyxla").rglob("*.py"), *(ROOT / "csrc").rglob("*.*")]
    assert len(files) > 200
    found = {str(path.relative_to(ROOT)) for path in files if ASKS.search(path.read_text())}
    assert found - PLACES == set()


@pytest.mark.parametrize(
    "code",
    [
        "#if TORCH_VERSION_MINOR >= 14",
        "if sys.version_info >= (3, 12):",
        'if torch.__version__ >= "2.14":',
        'Version(version("jax")) < Version("0.11")',
        'jax.__version__.split(".")',
    ],
)
def test_such_a_question_is_found(code: str) -> None:
    assert ASKS.search(code)


def test_what_is_installed_is_what_is_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for needs in (project["project"]["dependencies"], project["build-system"]["requires"]):
        for requirement in needs:
            found = re.fullmatch(r"([\w-]+)(?:>=([\d.]+))?(?:,<([\d.]+))?", requirement)
            assert found, requirement
            name, least, below = found.groups()
            if name == "scikit-build-core":
                continue
            version = numbers(importlib.metadata.version(name))
            assert not least or version >= numbers(least), requirement
            assert not below or version < numbers(below), requirement


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]


@pytest.mark.parametrize("running", ["2.14.1", "3.13.0", "2.130.0"])
def test_another_torch_is_refused_in_one_sentence(running: str) -> None:
    compat.check_torch_version("2.13.0+cpu", "2.13.1+cu130")
    with pytest.raises(ImportError) as error:
        compat.check_torch_version("2.13.0+cpu", running)
    text = str(error.value)
    minor = ".".join(running.split(".")[:2])
    assert "\n" not in text
    assert ". " not in text
    for part in ("built for torch 2.13.0+cpu", f"torch {running} is installed", f"+torch{minor}"):
        assert part in text


def test_another_python_is_told_what_to_do(tmp_path: Path) -> None:
    """As in a checkout whose extension was built for another one: there is none that fits."""
    for path in (ROOT / "lazyxla").iterdir():
        if not path.name.startswith("_C"):
            (tmp_path / "lazyxla").mkdir(exist_ok=True)
            (tmp_path / "lazyxla" / path.name).symlink_to(path)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(tmp_path)}
    # Without what an editable installation puts before the path.
    code = """
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__]
import lazyxla
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"lazyxla's extension is not built for Python {version}: install" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are computed at once")
def test_annotations_may_name_what_is_not_there() -> None:
    names: dict[str, Any] = {}
    source = "def rule(x: Array, by: int = 2) -> Array: ..."
    exec(compile(source, __file__, "exec", dont_inherit=True), names)
    signature = compat.signature_of(names["rule"])
    assert list(signature.parameters) == ["x", "by"]
    assert signature.parameters["by"].annotation is int


def test_a_wheel_names_its_torch() -> None:
    provider = wheel_metadata.Provider()
    minor = compat.minor_of(torch.__version__)
    provider.build_state("wheel")
    assert provider.dynamic_metadata({}, {}) == {
        "version": f"{wheel_metadata.own_version()}+torch{minor}",
        "dependencies": [f"torch=={minor}.*"],
    }
    provider.build_state("sdist")
    assert provider.dynamic_metadata({}, {}) == {
        "version": wheel_metadata.own_version(),
        "dependencies": [],
    }


def test_the_table_of_versions_names_what_is_allowed() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"]:
        if "<" in requirement:
            assert f"`{requirement}`" in page
    makefile = Path(ROOT / "Makefile").read_text()
    minors = re.search(r"^TORCH_MINORS := (.*)$", makefile, re.MULTILINE)
    assert minors
    assert all(f"torch {minor}" in page for minor in minors[1].split())


def test_a_copy_of_the_sources_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `make test TORCH=...` works in."""
    tree, target = tmp_path / "tree", tmp_path / "copy"
    (tree / "a").mkdir(parents=True)
    monkeypatch.chdir(tree)
    subprocess.run(["git", "init", "-q"], check=True)
    (tree / ".gitignore").write_text("*.so\n")
    for name in ("a/kept", "a/changed", "a/gone", "a/built.so"):
        (tree / name).write_text("1")
    copy_sources.copy(target)
    (target / "a/own.so").write_text("built there")
    (tree / "a/changed").write_text("2")
    os.utime(tree / "a/changed", ns=(10**18, 10**18))
    (tree / "a/gone").unlink()
    kept = (target / "a/kept").stat().st_ctime_ns
    copy_sources.copy(target)
    assert sorted(path.name for path in (target / "a").iterdir()) == ["changed", "kept", "own.so"]
    assert (target / "a/changed").read_text() == "2"
    assert (target / "a/kept").stat().st_ctime_ns == kept
