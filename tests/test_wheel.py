"""A wheel: it is built, installed into an environment without a compiler, and runs a program."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from lazyxla import compat
from tests.conftest import ROOT
from tools import wheel_metadata

PROGRAM = """
import torch
import lazyxla

model = torch.nn.Linear(4, 2).to("lazyxla")
x = torch.ones(3, 4, device="lazyxla")
expected = torch.nn.functional.linear(x.cpu(), *[p.detach().cpu() for p in model.parameters()])
torch.testing.assert_close(model(x).detach().cpu(), expected)
assert lazyxla.counters()["executions"] > 0 and lazyxla.fallbacks() == {}
print(lazyxla.__file__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the wheel, and all else from this one."""
    if shutil.which("ccache") is None:
        pytest.skip("without ccache, building the wheel compiles everything once more")
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    tools = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    # In build/wheel, where the compiler is called as in build/editable: ccache knows it all.
    build = [*pip, "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, env={**os.environ, "PATH": tools})
    (wheel,) = folder.glob("*.whl")
    version = f"{wheel_metadata.own_version()}+torch{compat.minor_of(torch.__version__)}"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"lazyxla-{version}-{tag}-{tag}-")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    install = [*pip, "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True, env={**os.environ, "PATH": ""})  # no compiler
    packages = next((folder / "env").glob("lib/python*/site-packages"))
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(python: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(python), "-c", code],
        capture_output=True,
        text=True,
        cwd=python.parent,  # no checkout to import from
        env={**environment, "PATH": ""},
    )


def test_a_first_program(installed: Path) -> None:
    done = run(installed, PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed.parent.parent / "lib"))


def test_another_torch_is_refused_in_one_sentence(installed: Path) -> None:
    """As if it had been built for torch 2.12. The extension is not even looked for."""
    (info,) = installed.parent.parent.glob("lib/python*/site-packages/lazyxla/_build_info.py")
    before = info.read_text()
    extension = next(info.parent.glob("_C*.so"))
    extension.rename(extension.with_suffix(".away"))
    try:
        info.write_text(re.sub(r'"[^"]*"', '"2.12.1"', before))
        done = run(installed, "import torch")
    finally:
        info.write_text(before)
        extension.with_suffix(".away").rename(extension)
    assert done.returncode == 1
    told = (
        f"lazyxla was built for torch 2.12.1, but torch {torch.__version__} is installed: install"
    )
    assert told in done.stderr
