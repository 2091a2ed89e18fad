"""Collectives between processes (csrc/distributed/collectives.h) as XLA's own, for programs that
the processes run together.

Each process is one replica of such a program; `Program.groups` lists the replicas of each group.
The last input of an operator and its last result are a token: it only keeps order, and counts the
calls.

On the CPU a program that is one process's own calls the host instead: lowering/cpu/collectives.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.builder.reductions import COMBINERS
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

SHARED = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")
"""Those that all processes of a group call, by their names in the namespace lazyxla_c10d."""
MESSAGES = ("send", "start_receive", "finish_receive")
"""Messages from one process to another: the host exchanges them on all platforms."""

_KINDS = ("sum", None, "prod", "min", "max", "and", "or", "xor")
"""The builder's reductions, by the number of c10d's ReduceOp. A mean, or a premultiplied sum, is
recorded as a sum and an operator before or after it."""
_OF_BOOLS = {"sum": "or", "max": "or", "prod": "and", "min": "and"}
"""Gloo and NCCL add bools as bytes, so that the sum of two is true if one is."""
_BITWISE = ("and", "or", "xor")
_NOT_SCATTERED = (torch.float64, torch.complex64, torch.complex128)
"""Dtypes for which the TPU's compiler has no reduce_scatter."""
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def members(b: Builder, group: str) -> Sequence[Sequence[int]]:
    """Which replicas of the program are together.

    Raises:
        LoweringError: the program is one process's own.
    """
    if group not in b.groups:
        raise LoweringError(
            f"torch.distributed: the devices of {b.platform} do not span the processes of this "
            "program, so that it has no collectives"
        )
    return b.groups[group]


def _handed_on(b: Builder, results: Sequence[Value], token: Value) -> list[Value]:
    return [*results, token + 1]


def _groups(b: Builder, group: str) -> Any:
    """A replica_groups attribute."""
    found = members(b, group)
    ir = b.mlir.ir
    numbers = [ir.IntegerAttr.get(b.mlir.element(torch.int64), n) for row in found for n in row]
    return ir.DenseElementsAttr.get(numbers, b.type(torch.int64, (len(found), len(found[0]))))


def _kind(x: Value, op: int, name: str) -> str:
    """The reduction of c10d's number for a value.

    Raises:
        LoweringError: it has none.
    """
    kind = _KINDS[op] if op < len(_KINDS) else None
    if kind is None or (kind in _BITWISE and not x.is_exact) or (kind == "min" and x.is_complex):
        raise LoweringError(f"{name}: there is no such reduction of {x.dtype}, number {op}")
    return _OF_BOOLS.get(kind, kind) if x.dtype == torch.bool else kind


def _is_native(x: Value, kind: str) -> bool:
    """Whether all compilers reduce such elements between replicas: integers of 16 bits are not
    NCCL's, and of what has 64 bits the TPU's compiler only adds."""
    if x.dtype == torch.bool:
        return kind in ("and", "or")
    if kind in _BITWISE or (x.is_exact and x.dtype.itemsize == 2):
        return False
    return kind == "sum" or x.dtype.itemsize < 8


def _reduced(b: Builder, x: Value, kind: str, group: str) -> Value:
    if not _is_native(x, kind):
        return b.reduce(_gathered(b, x, group), [0], kind)
    op = b.hlo.AllReduceOp([x.type], [x], replica_groups=_groups(b, group))
    b.region(op.regions[0], [x.dtype] * 2, lambda a, e: [a.call(COMBINERS[kind], e)])
    return b.wrap(op.results)[0]


def _gathered(b: Builder, x: Value, group: str) -> Value:
    """Each member's in turn."""
    whole = b.type(x.dtype, (len(members(b, group)[0]), *x.shape))
    op = b.hlo.AllGatherOp([whole], [b.reshape(x, (1, *x.shape))], 0, _groups(b, group))
    return b.wrap(op.results)[0]


def _exchanged(b: Builder, x: Value, processes: int, group: str) -> Value:
    """Sends each member its part of the rows, and receives one from each."""
    return b.wrap(b.hlo.AllToAllOp([x], 0, 0, processes, _groups(b, group)).results)[0]


@rule("lazyxla_c10d::all_reduce")
def all_reduce(b: Builder, inputs: list[Value], group: str, op: int) -> list[Value]:
    *data, token = inputs
    results = [
        x if 0 in x.shape else _reduced(b, x, _kind(x, op, "all_reduce"), group) for x in data
    ]
    return _handed_on(b, results, token)


@rule("lazyxla_c10d::broadcast")
def broadcast(b: Builder, inputs: list[Value], group: str, root: int) -> list[Value]:
    """A sum of the root's bits and zeros: not all compilers have a broadcast."""
    *data, token = inputs
    rows = members(b, group)
    own = b.convert(b.hlo.replica_id(), torch.int64)
    is_root = own == rows[0][root]
    for row in rows[1:]:
        is_root |= own == row[root]

    def sent(x: Value) -> Value:
        if 0 in x.shape:
            return x
        bits = _bits(b, x)
        given = b.select(is_root, bits, bits.full(0))
        return _from_bits(b, _reduced(b, given, "or" if x.dtype == torch.bool else "sum", group), x)

    return _handed_on(b, [sent(x) for x in data], token)


def _bits(b: Builder, x: Value) -> Value:
    """The elements as unsigned integers, which can be added; a complex number is two."""
    if x.is_complex:
        parts = [b.reshape(part, (*x.shape, 1)) for part in (x.real, x.imag)]
        return _bits(b, b.hlo.concatenate(parts, len(x.shape)))
    if x.dtype == torch.bool:
        return x
    bits = b.bitcast(x, _UNSIGNED[x.dtype.itemsize])
    return b.convert(bits, torch.uint32) if bits.dtype == torch.uint16 else bits


def _from_bits(b: Builder, bits: Value, like: Value) -> Value:
    if like.is_complex:
        part = torch.float32 if like.dtype == torch.complex64 else torch.float64
        both = b.bitcast(bits, part)
        halves = [b.slice_dim(both, len(like.shape), i, i + 1) for i in (0, 1)]
        return b.hlo.complex(*(b.reshape(half, like.shape) for half in halves))
    if like.dtype == torch.bool:
        return bits
    return b.bitcast(b.convert(bits, _UNSIGNED[like.dtype.itemsize]), like.dtype)


@rule("lazyxla_c10d::all_gather")
def all_gather(b: Builder, inputs: list[Value], group: str, processes: int) -> list[Value]:
    *data, token = inputs

    def gathered(x: Value) -> Value:
        if 0 in x.shape:
            return b.zeros((processes, *x.shape), x.dtype)
        return _gathered(b, x, group)

    return _handed_on(b, [gathered(x) for x in data], token)


@rule("lazyxla_c10d::reduce_scatter")
def reduce_scatter(b: Builder, inputs: list[Value], group: str, op: int) -> list[Value]:
    *data, token = inputs

    def scattered(x: Value) -> Value:
        kind = _kind(x, op, "reduce_scatter")
        if 0 in x.shape:
            return b.zeros(x.shape[1:], x.dtype)
        if not _is_native(x, kind) or x.dtype in _NOT_SCATTERED:
            return b.reduce(_exchanged(b, x, x.shape[0], group), [0], kind)
        part = b.type(x.dtype, (1, *x.shape[1:]))
        made = b.hlo.ReduceScatterOp(part, x, 0, _groups(b, group))
        b.region(made.regions[0], [x.dtype] * 2, lambda a, e: [a.call(COMBINERS[kind], e)])
        return b.reshape(b.wrap(made.results)[0], x.shape[1:])

    return _handed_on(b, [scattered(x) for x in data], token)


@rule("lazyxla_c10d::all_to_all")
def all_to_all(
    b: Builder,
    inputs: list[Value],
    group: str,
    sent_rows: list[int],
    received_rows: list[int],
    even: bool,
) -> list[Value]:
    """All-to-all with equal numbers of rows; others are exchanged by the host."""
    x, token = inputs
    processes = len(sent_rows)
    if {*sent_rows, *received_rows} != {sent_rows[0]} or len(members(b, group)[0]) != processes:
        raise LoweringError(
            f"all_to_all: {sent_rows} rows are sent, {received_rows} received; within a program "
            "they are as many for each process"
        )
    if math.prod(x.shape) == 0:
        return _handed_on(b, [x], token)
    return _handed_on(b, [_exchanged(b, x, processes, group)], token)


def _refuse(name: str) -> Callable[..., Any]:
    def lower(b: Builder, *_: Any) -> Any:
        raise LoweringError(f"{name}: messages between processes are no part of a program")

    return lower


for _name in MESSAGES:
    rule(f"lazyxla_c10d::{_name}")(_refuse(f"lazyxla_c10d::{_name}"))
