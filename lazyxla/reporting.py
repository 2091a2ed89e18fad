"""Reports when a program is compiled, why, and from which line.

The messages go to the Python logger named ``lazyxla`` at level info; ``LAZYXLA_LOG=info`` shows
them::

    lazyxla: train.py:31: compiling 412 operators (a new graph), lowered in 0.08 s
    lazyxla: train.py:31: compiling 412 operators (a new graph: like one before, but input 0 is
        Long[4, 96], not Long[4, 128]), lowered in 0.08 s
    lazyxla: train.py:31: loading 412 operators, compiled before (a new graph)
    lazyxla: train.py:31: running 2 operators by PyTorch's kernels (a new graph: like one before,
        but input 0 is Float[9, 3], not Float[8, 3])
    lazyxla: train.py:31: cutting 412 operators into 2 + 409 + 1 (a new graph: like one before, but
        operator 0, aten::flip, has other arguments)

A line that keeps causing new programs for the same reason is warned of once (recompilations.py).

``LAZYXLA_LOG=debug`` adds the hash of each program's key: it depends only on what was recorded, so
two runs of a script log the same hashes.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import typing_extensions
from torch import nn

from lazyxla import lowering, recompilations
from lazyxla.lowering import Lowered, Program, Target

logger = logging.getLogger("lazyxla")

# The user's line, the reason in words, the hash of the graph's key.
Occasion = tuple[str, str, int]

_MOST_NAMES = 20  # in one message

LIBRARIES = [
    *(os.path.join(os.path.dirname(os.path.abspath(m)), "") for m in (__file__, torch.__file__)),
    os.path.abspath(typing_extensions.__file__),  # whose decorators are around torch's functions
]


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


def loaded(operators: int, occasion: Occasion) -> None:
    """Reports that a program was loaded from disk instead of compiled, with its operator count."""
    if logger.isEnabledFor(logging.INFO):
        where, reason, key = occasion
        logger.info("%s: loading %d operators, compiled before (%s)", _at(where), operators, reason)
        logger.debug("key %016x", key)


def on_host(program: Program, occasion: Occasion) -> None:
    """Reports that PyTorch's kernels run a graph on the host."""
    where, reason, _ = occasion
    _warn(program, occasion)
    count = len(program.nodes)
    logger.info("%s: running %d operators by PyTorch's kernels (%s)", _at(where), count, reason)


def cut(operators: Sequence[int], occasion: Occasion) -> None:
    """Reports that a graph was cut into stages, with the operator count of each."""
    where, reason, _ = occasion
    runs = [(size, len(list(run))) for size, run in itertools.groupby(operators)]
    sizes = " + ".join(f"{count} x {size}" if count > 1 else str(size) for size, count in runs)
    logger.info("%s: cutting %d operators into %s (%s)", _at(where), sum(operators), sizes, reason)


def lower(
    program: Program, platform: str, device: Any, version: Sequence[int] | None, occasion: Occasion
) -> Lowered:
    """:func:`lazyxla.lowering.lower` for a platform's device, with a message."""
    target = Target.of(platform, device, version)
    where, reason, key = occasion
    _warn(program, occasion)
    if not logger.isEnabledFor(logging.INFO):
        return lowering.lower(program, target)
    begin = time.perf_counter()
    lowered = lowering.lower(program, target)
    seconds = time.perf_counter() - begin
    shown, _, _ = reason.partition(" of a new graph")  # cut() has told why a graph of stages is new
    logger.info(
        "%s: compiling %d operators (%s), lowered in %.2f s",
        *(_at(where), len(program.nodes), shown, seconds),
    )
    logger.debug("key %016x", key)
    return lowered


def _warn(program: Program, occasion: Occasion) -> None:
    where, reason, _ = occasion
    if warning := recompilations.note(where, reason, program):
        logger.warning("%s", warning)


def _at(line: str) -> str:
    return line or "autograd's thread"


def names_of(addresses: Sequence[int]) -> str:
    """The user's names of the tensors whose memory begins at these addresses, as far as known.

    Walks all objects there are: for messages about failures only.
    """
    names = names_by_address(gc.get_objects())
    known = sorted(names[address] for address in set(addresses) if address in names)
    shown = known[:_MOST_NAMES]
    if len(addresses) > len(shown) and shown:
        shown.append(f"and {len(addresses) - len(shown)} more")
    return ", ".join(shown)


def names_by_address(everything: list[Any]) -> dict[int, str]:
    """The user's names of tensors, among all objects there are, by the address of their memory.

    Parameters and buffers are named as their outermost module names them, what optimizers keep by
    its key and its parameter.
    """
    names: dict[int, str] = {}
    # By type(): asking some objects of torch for their __class__ warns.
    modules = [thing for thing in everything if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    for module in modules:
        if id(module) in inner:
            continue
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.device.type == "lazyxla":
                names.setdefault(tensor.data_ptr(), name)
    for thing in everything:
        if not issubclass(type(thing), torch.optim.Optimizer):
            continue
        for parameter, state in thing.state.items():
            whose = names.get(parameter.data_ptr(), "a parameter")
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.device.type == "lazyxla":
                    names.setdefault(value.data_ptr(), f"{key} of {whose}")
    return names
