"""Why a graph is new, in words: how it differs from one before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lazyxla.planning.alignment import align
from lazyxla.planning.outline import Outline

_MOST_NAMED_EDITS = 32
"""Operators that only one of two graphs of other shapes has: with more it is another computation.
"""


def common_operators(a: Outline, b: Outline) -> int:
    """How many operators both begin with."""
    pairs = zip(a.names, b.names, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def compare(now: Outline, before: Outline) -> str:
    """Two graphs that begin with the same operators."""
    common = common_operators(now, before)
    if common == len(now) == len(before):
        return ": like one before, but " + _explain_difference(now, before)
    text = f": like one before up to operator {common}"
    if common == len(now):
        return text + ", where it ends"
    text += f", {now.names[common]}"
    return text + (f", which was {before.names[common]}" if common < len(before) else "")


def compare_by_names(now: Outline, outlines: Iterable[Outline]) -> str:
    """With the first of these graphs that has nearly the same operators, on data of other sizes;
    empty if none has.

    Data-dependent sizes change more than shapes: what takes no elements is another operator.
    """
    most = min(len(now) // 4, _MOST_NAMED_EDITS)
    for before in outlines:
        indices = align(now.names, before.names, most)
        if indices is None:
            continue
        difference = _other_input(now, before, indices)
        if not difference:
            difference = "for " + list_names(now, [index < 0 for index in indices])
        return f": like one before, but {difference}"
    return ""


def list_names(graph: Outline, which: Sequence[bool], most: int = 4) -> str:
    names = [f"{name} (operator {i})" for i, name in enumerate(graph.names) if which[i]]
    if not names:
        return "operators that it lacks"
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _other_input(now: Outline, before: Outline, indices: Sequence[int]) -> str:
    """The first input that the same operator takes as another shape or dtype."""
    for i, index in enumerate(indices):
        if index < 0:
            continue
        for value, other in zip(now.operands[i], before.operands[index], strict=False):
            if value < len(now.inputs) and other < len(before.inputs):
                ours, theirs = now.inputs[value], before.inputs[other]
                if ours != theirs:
                    return f"input {value} is {ours}, not {theirs}"
    return _changed_input(now, before) if len(now.inputs) == len(before.inputs) else ""


def _changed_input(now: Outline, before: Outline) -> str:
    for i, (ours, theirs) in enumerate(zip(now.inputs, before.inputs, strict=False)):
        if ours != theirs:
            return f"input {i} is {ours}, not {theirs}"
    return ""


def _explain_difference(now: Outline, before: Outline) -> str:
    """What differs between two graphs of the same operators."""
    if changed := _changed_input(now, before):
        return changed
    for i, (id, other) in enumerate(zip(now.ids, before.ids, strict=True)):
        if id != other:
            return f"operator {i}, {now.names[i]}, has other arguments"
    if len(now.inputs) != len(before.inputs):
        return "other tensors are the same"
    if now.outputs != before.outputs:
        return (
            f"{len(now.outputs)} results are alive at its end, not {len(before.outputs)} or not "
            "the same"
        )
    if now.aliases != before.aliases:
        return "other tensors are written in place"
    return "operators take each other's results differently"
