"""Telling when a program is compiled, why, and from which line.

The messages go to the Python logger named ``lazyxla`` at level info; ``LAZYXLA_LOG=info`` shows
them::

    lazyxla: train.py:31: compiling 412 operators (a new graph), lowered in 0.08 s
    lazyxla: train.py:31: compiling 412 operators (a new graph: like one before, but input 0 is
        Long[4, 96], not Long[4, 128]), lowered in 0.08 s
    lazyxla: train.py:31: loading 412 operators, compiled before (a new graph)
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from lazyxla import lowering
from lazyxla.lowering import Lowered, Program, Target

logger = logging.getLogger("lazyxla")

_LIBRARIES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(m)), "") for m in (__file__, torch.__file__)
)


def set_level(name: str) -> None:
    """Sets the least level shown: "debug", "info", "warning" or "error".

    Below the default a handler of our own writes to standard error, unless the program has set up
    logging itself.
    """
    logger.setLevel(name.upper())
    if name in ("debug", "info") and not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


def user_line() -> str:
    """File and line of the innermost frame that is neither torch's nor ours; else empty.

    On autograd's threads there is no Python frame to name.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = os.path.abspath(frame.f_code.co_filename)
        if not path.startswith(_LIBRARIES) and "importlib" not in path:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def loaded(operators: int, reason: str) -> None:
    """Tells that a program of so many operators was loaded from disk instead of compiled."""
    if logger.isEnabledFor(logging.INFO):
        where = user_line() or "autograd's thread"
        logger.info("%s: loading %d operators, compiled before (%s)", where, operators, reason)


def lower(
    program: Program, platform: str, device: Any, version: Sequence[int] | None, reason: str
) -> Lowered:
    """:func:`lazyxla.lowering.lower` for a platform's device, with a message."""
    target = Target.of(platform, device, version)
    if not logger.isEnabledFor(logging.INFO):
        return lowering.lower(program, target)
    where = user_line() or "autograd's thread"
    begin = time.perf_counter()
    lowered = lowering.lower(program, target)
    seconds = time.perf_counter() - begin
    count = len(program.nodes)
    logger.info("%s: compiling %d operators (%s), lowered in %.2f s", where, count, reason, seconds)
    return lowered
