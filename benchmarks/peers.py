"""An environment with torch_xla, which needs a torch of its own, beside the project's.

torch_xla 2.9 runs with torch 2.9 only, and a plain ``torch==2.9.0`` is the CUDA build, gigabytes
with what it needs. The CPU build is asked for by its version; pip has to be configured with an
index that holds it, otherwise there is no such peer.
"""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

VERSION = "2.9.0"


def torch_xla_python(directory: Path) -> str:
    """The interpreter of an environment with torch_xla in ``directory``, made if missing.

    Raises:
        RuntimeError: it cannot be made here; the message says why.
    """
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        venv.create(directory, with_pip=True, clear=True)
        pip = (str(python), "-m", "pip", "install", "-q")
        torch = f"torch=={VERSION}+cpu"
        _run(f"pip finds no CPU build of torch {VERSION}", *pip, torch, "numpy")
        _run(f"torch_xla {VERSION} does not install", *pip, f"torch_xla=={VERSION}", torch)
        (directory / "complete").touch()
    return str(python)


def _run(problem: str, *command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(": ".join([problem, *reason]))
