"""The one error of the lowering, and whose line it came from."""

from __future__ import annotations

import functools
import importlib.util
import os
import sysconfig
from typing import Any

from lazyxla.lowering.value import Value


class LoweringError(RuntimeError):
    """A node could not be lowered; the message names the operator and its argument types.

    ``node`` is the node's position in ``Program.nodes``; None until the lowering knows it.
    """

    node: int | None = None


class DifferentProgramsError(LoweringError):
    """A function is another program for other sizes, so that it is none for all of them."""


def is_users(path: str) -> bool:
    """Whether a Python file is a user's: none of torch's, JAX's, the interpreter's or ours."""
    if path.startswith(("<frozen ", "<string>", *_libraries())):
        return False
    within_stdlib = path.startswith(sysconfig.get_paths()["stdlib"] + os.sep)
    return not within_stdlib or "site-packages" in path or "dist-packages" in path


@functools.cache
def _libraries() -> tuple[str, ...]:
    specs = map(importlib.util.find_spec, ("lazyxla", "torch", "jax", "jaxlib", "numpy"))
    origins = (s.origin for s in specs if s is not None and s.origin is not None)
    return tuple(os.path.join(os.path.dirname(os.path.abspath(o)), "") for o in origins)


def show_call(name: str, args: tuple[Any, ...]) -> str:
    """The call as an error message shows it: aten::mm(float32[2, 3], float32[3, 4])."""

    def show(arg: Any) -> str:
        if isinstance(arg, Value):
            return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
        if isinstance(arg, (list, tuple)):
            return "[" + ", ".join(map(show, arg)) + "]"
        return repr(arg)

    return f"{name}({', '.join(map(show, args))})"
