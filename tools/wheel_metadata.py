"""The metadata of a wheel that depend on what it is built with, for scikit-build-core.

The extension is compiled against torch's C++ interface, which is stable within a minor version
only. So there is a wheel for each: its version names torch's (``0.1.0+torch2.15``), and it requires
that one (``torch==2.15.*``), so that pip chooses the wheel that fits.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def own_version() -> str:
    """The version of lazyxla, which its ``__init__.py`` has."""
    text = (ROOT / "lazyxla" / "__init__.py").read_text()
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError("lazyxla/__init__.py has no __version__")
    return found[1]


class Provider:
    """What scikit-build-core asks for the fields of ``project.dynamic``."""

    def __init__(self) -> None:
        self._state = "wheel"

    def build_state(self, state: str) -> None:
        """Hears what is built: "sdist", "wheel", "editable", or the metadata of one of these."""
        self._state = state

    def dynamic_metadata(
        self, settings: Mapping[str, Any], project: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The version, and the torch to require beside the dependencies that are listed."""
        if self._state == "sdist":  # fits any torch
            return {"version": own_version(), "dependencies": []}
        minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
        return {
            "version": f"{own_version()}+torch{minor}",
            "dependencies": [f"torch=={minor}.*"],
        }

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        """Tells that wheels of one source differ in what they require."""
        return {"dependencies": True}
