"""Arguments that share memory, of a compiled function that writes to one of them.

AOTAutograd traces a function for arguments whose memory is either apart or shares it in one way.
Dynamo's guards notice neither where in a storage an argument is, nor, with fixed sizes, that memory
is shared at all. So each call looks: if arguments share memory in another way than those that the
function was traced for, the operators of the function are recorded one by one, as without
``torch.compile``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._guards import TracingContext
from torch.fx.experimental.symbolic_shapes import has_free_symbols

from lazyxla import _C
from lazyxla.reporting import logger


def guarded(
    compiled: Callable[..., Any], module: fx.GraphModule, inputs: Sequence[Any]
) -> Callable[..., Any]:
    """A compiled function, or its module's operators for arguments that it was not compiled for.

    To be called while the function's tracing context is the current one.

    Args:
        compiled: what AOTAutograd made of the module.
        module: what Dynamo traced.
        inputs: the fake tensors that it was compiled for.
    """
    written = _written(len(inputs))
    if not written:
        return compiled
    find = _C.shared_arguments(len(inputs), written)
    traced = _traced(inputs, written)

    def call(*args: Any) -> Any:
        shared = find(*args)
        if shared is None and traced == ():
            return compiled(*args)
        if _described(args, _overlapping(args, shared, written)) == traced:
            return compiled(*args)
        logger.info("recording a compiled function's operators: its arguments overlap otherwise")
        return module(*args)

    return call


def _written(count: int) -> list[int]:
    """The positions of the arguments that are written to; of all, if it is not known of which."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return list(range(count))
    written = [i for i, each in enumerate(metadata.input_info) if each.mutates_data]
    # Arguments that overlap have become one there, and each subclass may have become several.
    return written if not written or len(metadata.input_info) == count else list(range(count))


def _traced(inputs: Sequence[Any], written: Sequence[int]) -> tuple[Any, ...] | None:
    """Where the arguments were that a function was compiled for. None, which equals nothing, if
    some overlap that have symbolic sizes."""
    storages = defaultdict[int, list[int]](list)
    for position, x in enumerate(inputs):
        if isinstance(x, torch.Tensor):
            storages[x.untyped_storage()._cdata].append(position)
    shared = [p for group in storages.values() if len(group) > 1 for p in group]
    if not any(has_free_symbols(inputs[p]) for p in shared):
        return _described(inputs, _overlapping(inputs, shared, written))
    with inputs[shared[0]].fake_mode.shape_env.suppress_guards():
        return None if _overlapping(inputs, shared, written, symbolic=True) else ()


def _overlapping(
    args: Sequence[Any],
    shared: Sequence[int] | None,
    written: Sequence[int],
    symbolic: bool = False,
) -> list[int]:
    """Those of the arguments with a common storage that overlap, if one of them is written."""
    if not shared:
        return []
    found = compute_overlapping_tensors([args[p] for p in shared], symbolic)
    positions = sorted(shared[i] for i in found)
    return [] if set(positions).isdisjoint(written) else positions


def _described(args: Sequence[Any], positions: Sequence[int]) -> tuple[Any, ...]:
    """Where in memory these arguments are: all that AOTAutograd's graph depends on."""
    storages: dict[int, int] = {}
    found = []
    for position in positions:
        x = args[position]
        storage = x.untyped_storage()
        number = storages.setdefault(storage._cdata, len(storages))
        base = None if x._base is None else _geometry(x._base)
        found.append((position, number, storage.nbytes(), _geometry(x), base))
    return tuple(found)


def _geometry(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.stride(), x.storage_offset()
