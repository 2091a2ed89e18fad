"""Warning of a line that keeps causing new programs for the same reason."""

from __future__ import annotations

import re

from lazyxla.lowering import Program, registry
from lazyxla.lowering.program import Ref

_PATIENCE = 5
"""Programs that a line may cause for one reason before a warning."""

_FEWEST_OPERATORS = 4
"""Smaller programs are compiled in milliseconds; eager mode makes one for each kind of call."""

_MOST_REMEMBERED = 10_000

_OTHER_OPERATORS = "for ", "up to "
"""How differences begin that are in the operators themselves."""

_INPUT = re.compile(r"input (\d+) is (\w+)\[([\d, ]*)\], not (\w+)\[([\d, ]*)\]")

_causes: dict[tuple[str, str], tuple[int, str]] = {}
"""By line and reason: how many programs, and what was different in the last graph. The stages that
a graph was cut into count as one."""


def note(line: str, reason: str, program: Program) -> str | None:
    """Counts a program that is compiled, or that the host runs in place of a compiled one.

    Args:
        line: the user's, that caused it ("train.py:31"); empty if it is not known.
        reason: why it is new, in the words of lazyxla/planning/history.py, after the stage if the
            graph was cut.

    Returns:
        A warning, once for each line and reason.
    """
    start, alike, difference = reason.partition(": like one before")
    if not line or len(program.nodes) < _FEWEST_OPERATORS or not alike or _is_padded(program):
        return None
    if len(_causes) >= _MOST_REMEMBERED:
        _causes.clear()
    difference = difference.removeprefix(", but ").strip()
    others = difference.startswith(_OTHER_OPERATORS)
    cause = line, "other operators" if others else re.sub(r"\d+", "N", difference)
    is_stage = start.startswith("stage ")
    count, last = _causes.get(cause, (0, ""))
    if is_stage and last == difference:
        return None
    _causes[cause] = count + 1, difference
    if count + 1 != _PATIENCE:
        return None
    what, cure = _explain(difference, None if is_stage else program)
    if "transformers" in line:
        cure += '; for generate(), cache_implementation="static"'
    return (
        f"{line}: has caused {_PATIENCE} new programs for the same reason, the last one because "
        f"{what}. To cause no more, {cure}. (Told once; LAZYXLA_LOG=info tells each.)"
    )


def _is_padded(program: Program) -> bool:
    """Whether it has a graph of torch.compile's for a bucket of sizes: these are few."""
    graphs = [registry.graphs.get(n.args[0]) for n in program.nodes if n.op == "lazyxla::graph"]
    return any(graph is not None and graph.is_padded for graph in graphs)


def _explain(difference: str, program: Program | None) -> tuple[str, str]:
    """What differs from the program before, and what can be done about it. `program` is a whole
    graph's, if it is known: that the difference is about."""
    if found := _INPUT.search(difference):
        number, dtype, now, other_dtype, before = found.groups()
        user = _user(program, int(number)) if program else None
        taken = f", which {user} takes," if user else ""
        sizes, others = now.split(", "), before.split(", ")
        if dtype == other_dtype and len(sizes) == len(others):
            changed = [i for i, (n, m) in enumerate(zip(sizes, others, strict=True)) if n != m]
            sizes_now = ", ".join(f"dimension {i} from {others[i]} to {sizes[i]}" for i in changed)
            text = f"input {number}{taken} of shape [{now}] changed in {sizes_now}"
            cure = "pad to a few sizes (lazyxla.bucket), or drop what is smaller (drop_last=True)"
            return text, cure
        text = f"input {number}{taken} was {other_dtype}[{before}] and is {dtype}[{now}]"
        return text, "give it the same dtype and number of dimensions each time"
    if difference.startswith(_OTHER_OPERATORS):
        text = re.sub("^(for|up to) ", "", difference)
        return f"operators differ: {text}", "do the same in every step"
    text = difference.rstrip(")")
    if "has other arguments" in difference:
        return text, "keep its sizes and numbers the same, or index with tensors on the device"
    if "alive" in difference or "in place" in difference:
        return text, "keep the same tensors in every step, and call zero_grad() before the sync"
    return text, "do the same in every step"


def _user(program: Program, number: int) -> str | None:
    """The operator that takes an input, also through views of it."""
    seen, next_value = {number}, len(program.inputs)
    for node in program.nodes:
        made = range(next_value, next_value + len(node.outputs))
        next_value = made.stop
        if seen.isdisjoint(_refs(node.args)):
            continue
        if not node.op.startswith("lazyxla::"):
            return node.op
        seen.update(made)
    return None


def _refs(args: object) -> list[Ref]:
    if isinstance(args, Ref):
        return [args]
    if isinstance(args, (list, tuple)):
        return [ref for arg in args for ref in _refs(arg)]
    return []
