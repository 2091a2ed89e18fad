"""Which node of a static FX graph runs where, and when.

Usually the whole graph belongs to one device: it is one part, which becomes one node of the
pending graph. Otherwise it is cut where values cross between a device and the rest (another device,
the CPU, an operator that only the host can run), into as few parts as their dependencies allow;
what belongs to no part is run by PyTorch, operator by operator.

Two things keep the number of parts low. Arithmetic on 0-dim CPU tensors, such as an optimizer's
step count, is repeated within the part that uses it, so that only the tensors it starts from are
inputs. And what a graph writes into its arguments, which AOTAutograd puts at its end as ``copy_``
operators, is written by the part that computes it.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from lazyxla import _C, lowering, runtime
from lazyxla.dynamo.memory_order import reaches_beyond
from lazyxla.lowering import control_flow, lookup, registry
from lazyxla.lowering.fx_graph import program_of
from lazyxla.lowering.operators import draws, schema_name

HOST = -1
"""The kind of a node that PyTorch runs. The kind of a part's nodes is their device's index."""
_NUMBER = -2
"""The kind of arithmetic on 0-dim CPU tensors, which runs wherever its results are needed."""

# dtypes of 0-dim CPU tensors that can be numbers of a program
_NUMBER_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)


@dataclass
class Segment:
    """Nodes that run together: a part on a device, or the host's operators."""

    kind: int
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)  # of a part
    outputs: list[fx.Node] = field(default_factory=list)
    writes: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # argument, new value


@dataclass
class Partition:
    """A graph's segments in the order in which they run, and the host's copies to arguments."""

    arguments: list[fx.Node]
    results: list[Any]  # nodes, or what else the graph returns
    segments: list[Segment]
    last: list[fx.Node]


def is_number(node: fx.Node) -> bool:
    """Whether a node is a 0-dim CPU tensor that can be a number of a program."""
    value: Any = node.meta.get("val")
    return (
        _is_tensor(value)
        and value.device.type == "cpu"
        and tuple(value.shape) == ()
        and value.dtype in _NUMBER_DTYPES
    )


def divide(graph: fx.Graph) -> Partition | None:
    """Divides a graph into segments; None if its writes are not all at its end."""
    nodes = list(graph.nodes)
    calls = [n for n in nodes if n.op == "call_function"]
    (output,) = (n for n in nodes if n.op == "output")
    listed = output.args[0]
    results = list(listed) if isinstance(listed, (list, tuple)) else [listed]
    # What a write returns is what it has written.
    results = [r.args[0] if isinstance(r, fx.Node) and _is_mutable(r) else r for r in results]
    # AOTAutograd's graphs are functional but for writes to their arguments at the end.
    last = [n for n in calls if _is_mutable(n)]
    calls = [n for n in calls if not _is_mutable(n)]
    if any(_is_mutable(o) for n in calls for o in n.all_input_nodes):
        return None

    kinds: dict[fx.Node, int] = {}
    for node in calls:
        kinds[node] = _kind(node, kinds)
    used_last = [r for r in results if isinstance(r, fx.Node)]
    used_last += [o for n in last for o in n.all_input_nodes]
    segments = _segments(calls, kinds, _numbers_on_host(calls, kinds, used_last))
    where = {node: position for position, segment in enumerate(segments) for node in segment.nodes}
    last = [n for n in last if not _write_in_part(n, segments, where)]
    for segment in segments:
        if segment.kind != HOST:
            _add_numbers(segment, calls, kinds)
            members = set(segment.nodes)
            operands = dict.fromkeys(o for n in segment.nodes for o in n.all_input_nodes)
            segment.inputs = [
                o for o in operands if o not in members and not control_flow.is_function(o)
            ]
            segment.inputs += [a for a, _ in segment.writes if a not in segment.inputs]
    _find_outputs(
        segments, kinds, [*output.all_input_nodes, *(o for n in last for o in n.all_input_nodes)]
    )
    arguments = [n for n in nodes if n.op == "placeholder"]
    return Partition(arguments, results, segments, last)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "device")


def _tensors(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    return [p for p in parts if p is not None]


def _is_sparse(value: Any) -> bool:
    # Sizes that a call gives are in descriptions of dense tensors, which have no layout.
    return getattr(value, "layout", torch.strided) not in (torch.strided, torch.jagged)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _how(target: Any) -> str:
    """How an operator is lowered, according to the registry."""
    return _how_on(_C.captured_platform(), target)


@functools.lru_cache(maxsize=4096)
def _how_on(_captured_platform: str, target: Any) -> str:
    return lookup.how(schema_name(target)) if isinstance(target, torch._ops.OpOverload) else "host"


registry.on_change(lambda *_: _how_on.cache_clear())


def lowers(node: fx.Node) -> bool:
    """Whether a node can be lowered."""
    if control_flow.is_control_flow(node.target):
        return control_flow.lowers(node, _lowers_within)
    how = _how(node.target)
    if how == "decomposition":  # its parts may have no rules
        return lowering.check_lowering(program_of(node), runtime.platform()) != "host"
    return how != "host"


def _lowers_within(node: fx.Node) -> bool:
    """The same for a node of a function that an operator calls."""
    return lowers(node) and not has_positions_of_masks(node)


def _kind(node: fx.Node, kinds: dict[fx.Node, int]) -> int:
    if node.target is operator.getitem:
        return kinds.get(node.args[0], HOST)  # type: ignore[arg-type]
    parts = _tensors(node)
    if not parts or not all(map(_is_tensor, parts)) or not lowers(node):
        return HOST
    if has_positions_of_masks(node) or reaches_beyond(node):
        return HOST
    devices = {_device_kind(p) for p in parts}
    read = [v for o in node.all_input_nodes for v in _tensors(o) if _is_tensor(v)]
    if any(map(_is_sparse, [*parts, *read])):
        return HOST  # their kernels take them apart
    sources = set(map(_device_kind, read))
    if devices != {HOST}:
        (kind, *others) = devices
        return HOST if others or sources - {kind, HOST} else kind
    numbers = all(tuple(p.shape) == () and p.device.type == "cpu" for p in parts) and all(
        is_number(o) if o.op == "placeholder" else kinds.get(o) == _NUMBER
        for o in node.all_input_nodes
    )
    return _NUMBER if numbers and node.all_input_nodes and not draws(node.target) else HOST


def _indices(node: fx.Node) -> list[Any]:
    """The index tensors of an indexing operator; None for a dimension without."""
    if not getattr(node.target, "__name__", "").removeprefix("_unsafe_").startswith("index"):
        return []
    indices = node.args[1] if len(node.args) > 1 else None
    return list(indices) if isinstance(indices, (list, tuple)) else []


def has_positions_of_masks(node: fx.Node) -> bool:
    """Whether an operator indexes where masks are true, for which their positions must be known."""
    return _has_masks(node) and not _is_put_by_one_mask(node)


def _has_masks(node: fx.Node) -> bool:
    """Whether an operator is given masks as indices, which the recorder segments into positions."""
    return any(
        isinstance(i, fx.Node) and i.meta["val"].dtype in (torch.bool, torch.uint8)
        for i in _indices(node)
    )


def _is_put_by_one_mask(node: fx.Node) -> bool:
    """Whether it writes where one mask is true, which needs no positions."""
    name = getattr(node.target, "__name__", "")
    return "index_put" in name and sum(i is not None for i in _indices(node)) == 1


def _device_kind(value: Any) -> int:
    return (value.device.index or 0) if value.device.type == "lazyxla" else HOST


def _numbers_on_host(
    calls: list[fx.Node], kinds: dict[fx.Node, int], used_last: list[fx.Node]
) -> set[fx.Node]:
    """The numbers that PyTorch needs, too: to return them, to write them, or for its operators."""
    found = {n for n in used_last if kinds.get(n) == _NUMBER}
    for node in reversed(calls):
        if kinds[node] == HOST or node in found:
            found |= {o for o in node.all_input_nodes if kinds.get(o) == _NUMBER}
    return found


def _segments(
    calls: list[fx.Node], kinds: dict[fx.Node, int], numbers_on_host: set[fx.Node]
) -> list[Segment]:
    """The segments, each as early as it can be.

    A node waits for what it needs from other kinds; one that draws random numbers, for those of its
    kind that draw before it.
    """
    stages: dict[fx.Node, tuple[int, int]] = {}
    last_draws: dict[int, tuple[int, int]] = {}
    segments: dict[tuple[int, int], Segment] = {}
    for node in calls:
        kind = kinds[node]
        if kind == _NUMBER:
            if node not in numbers_on_host:
                continue
            kind = HOST
        needs = [
            stages[o]
            for o in node.all_input_nodes
            if o in stages and (kind == HOST or kinds[o] != _NUMBER)
        ]
        random = draws(node.target)
        if random and kind in last_draws:
            needs.append(last_draws[kind])
        stage = max((s + (other != kind) for s, other in needs), default=0)
        stages[node] = (stage, kind)
        if random:
            last_draws[kind] = stages[node]
        segments.setdefault((stage, kind), Segment(kind)).nodes.append(node)
    return [segments[key] for key in sorted(segments)]


def _write_in_part(node: fx.Node, segments: list[Segment], where: dict[fx.Node, int]) -> bool:
    """Gives ``copy_(argument, value)`` to the part that computes the value, if nothing that runs
    later reads the argument."""
    if node.target is not torch.ops.aten.copy_.default or len(node.args) != 2:
        return False
    argument, value = node.args
    if not isinstance(argument, fx.Node) or not isinstance(value, fx.Node) or value not in where:
        return False
    segment = segments[where[value]]
    before, after = argument.meta["val"], value.meta["val"]
    same = (
        argument.op == "placeholder"
        and segment.kind == _device_kind(before) != HOST
        and before.dtype == after.dtype
        and tuple(before.shape) == tuple(after.shape)
    )
    if not same or any(where[user] > where[value] for user in argument.users if user in where):
        return False
    segment.writes.append((argument, value))
    return True


def _add_numbers(segment: Segment, calls: list[fx.Node], kinds: dict[fx.Node, int]) -> None:
    """Adds to a part the arithmetic on numbers that it needs."""
    needed: set[fx.Node] = set()
    waiting = list(segment.nodes)
    while waiting:
        for operand in waiting.pop().all_input_nodes:
            if kinds.get(operand) == _NUMBER and operand not in needed:
                needed.add(operand)
                waiting.append(operand)
    if needed:
        segment.nodes = [n for n in calls if n in needed] + segment.nodes


def _find_outputs(
    segments: list[Segment], kinds: dict[fx.Node, int], used_last: list[fx.Node]
) -> None:
    """Sets what leaves each part: what other segments, the last copies and the caller need."""
    needed = dict.fromkeys(used_last)
    for segment in segments:
        if segment.kind == HOST:
            needed.update(dict.fromkeys(o for n in segment.nodes for o in n.all_input_nodes))
        else:
            needed.update(dict.fromkeys(segment.inputs))
    for segment in segments:
        if segment.kind != HOST:
            segment.outputs = [n for n in segment.nodes if n in needed and kinds[n] != _NUMBER]
