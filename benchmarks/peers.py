"""An environment with torch_xla, which needs a torch of its own, beside the project's.

torch_xla 2.9 runs with torch 2.9 only. Of torch, PyPI has the CUDA build, gigabytes with what it
needs; the CPU build is on PyTorch's own index. Without that one there is no such peer.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "2.9.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def torch_xla_python(directory: Path) -> str:
    """The interpreter of an environment with torch_xla in ``directory``, made if missing.

    Raises:
        RuntimeError: it cannot be made here; the message says why.
    """
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        wheels = directory.with_name(directory.name + "-wheels")
        torch = [f"torch=={VERSION}", "--index-url", CPU_INDEX]
        # Only the CPU build: its version says so, and --no-deps brings nothing along.
        _run(
            f"no CPU build of torch {VERSION} at {CPU_INDEX}",
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1"),
            *("--timeout", "20", "-d", str(wheels), *torch),
        )
        builds = list(wheels.glob(f"torch-{VERSION}+cpu-*.whl"))
        if not builds:
            raise RuntimeError(f"the index {CPU_INDEX} gave another build of torch {VERSION}")
        venv.create(directory, with_pip=True, clear=True)
        pip = (str(python), "-m", "pip", "install", "-q")
        _run("torch does not install", *pip, str(builds[0]), "numpy")
        _run(
            f"torch_xla {VERSION} does not install",
            *pip,
            f"torch_xla=={VERSION}",
            str(builds[0]),
        )
        (directory / "complete").touch()
    return str(python)


def _run(problem: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(": ".join([problem, *reason]))
