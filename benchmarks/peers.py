"""An environment with torch_xla, which needs a torch of its own, beside the project's.

torch_xla 2.9 runs with torch 2.9 only. Its CPU build is asked for first, but not every index has
it; a plain ``torch==2.9.0`` is the CUDA build: 7 GB with what it needs. It serves as well.
"""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

VERSION, TORCHVISION = "2.9.0", "0.24.0"


def torch_xla_python(directory: Path) -> str:
    """The interpreter of an environment with torch_xla in ``directory``, made if missing.

    Raises:
        RuntimeError: it cannot be made here; the message says why.
    """
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        venv.create(directory, with_pip=True, clear=True)
        pip = (str(python), "-m", "pip", "install", "-q")
        try:
            _run(*pip, f"torch=={VERSION}+cpu")
        except RuntimeError:
            _run(*pip, f"torch=={VERSION}")
        _run(*pip, f"torch_xla=={VERSION}", "numpy", "pillow", "transformers")
        _run(*pip, "--no-deps", f"torchvision=={TORCHVISION}")
        (directory / "complete").touch()
    return str(python)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        raise RuntimeError(": ".join([" ".join(command[3:]), *reason]))
