"""Writes the API reference as HTML, from the docstrings: ``python -m tools.api_reference FOLDER``.

All that is public: `lazyxla.__all__`, with the modules in it, and `MODULES`. pdoc does the work.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("lazyxla", "lazyxla.lowering", "lazyxla.config", "lazyxla.device_module")


def modules() -> list[ModuleType]:
    """All modules that have a page."""
    found = [importlib.import_module(name) for name in MODULES]
    return found + [v for m in found for v in public(m).values() if inspect.ismodule(v)]


def public(module: ModuleType) -> dict[str, Any]:
    """The functions, classes and values of a module that are the user's, by name."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
    return {name: getattr(module, name) for name in names}


def resolve_named_tuples(module: ModuleType) -> None:
    """Gives named tuples the types that their annotations name.

    A named tuple's constructor belongs to no module, so that pdoc cannot look names up for it.
    """
    for value in public(module).values():
        if inspect.isclass(value) and issubclass(value, tuple) and hasattr(value, "_fields"):
            value.__new__.__annotations__ = typing.get_type_hints(value)  # type: ignore[misc]


def write(folder: Path) -> None:
    """Writes the pages."""
    import pdoc

    for module in modules():
        resolve_named_tuples(module)
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
