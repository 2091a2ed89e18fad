"""The cut between what is new in a graph and what is known.

A loop whose steps differ in little would compile its whole step again and again. So a graph that is
new but for a few operators runs as up to three programs:

    before   what differs and does not depend on the large part, with what it needs
    middle   what is the same as before: compiled once, and found from then on
    after    what differs and depends on the middle, with what depends on it
"""

from __future__ import annotations

from collections.abc import Sequence

from lazyxla.planning.outline import Outline

BEFORE, MIDDLE, AFTER = range(3)

_SMALL = 16  # operators: a smaller graph is compiled in tens of milliseconds
_TAKEN_ALONG = 16
_PART_TAKEN_ALONG = 8
"""How much of the middle may be moved with an operator that differs: at most _TAKEN_ALONG
operators, and one in _PART_TAKEN_ALONG of all."""


def find_stages(graph: Outline, differs: Sequence[bool], least: float) -> list[int]:
    """The stage of each operator.

    Args:
        differs: which operators no earlier graph had.
        least: the part of the operators that the middle must be.

    Returns:
        an empty list if the graph is better left whole: it is small, or its middle would be.
    """
    needed = _needed_by_others(graph, differs)
    stages = [MIDDLE] * len(graph)
    for i, sources in enumerate(graph.sources):
        is_after = any(source >= 0 and stages[source] == AFTER for source in sources)
        if is_after or (differs[i] and not (needed[i] and _move_before(graph, i, stages))):
            stages[i] = AFTER
    sizes = [operator.size for operator in graph.operators]
    middle = sum(size for size, stage in zip(sizes, stages, strict=True) if stage == MIDDLE)
    if sum(sizes) < _SMALL or middle == sum(sizes) or middle < least * sum(sizes):
        return []
    return stages


def _needed_by_others(graph: Outline, differs: Sequence[bool]) -> list[bool]:
    """The operators on which one that does not differ depends, directly or not."""
    needed = [False] * len(graph)
    for i in reversed(range(len(graph))):
        if needed[i] or not differs[i]:
            for source in graph.sources[i]:
                if source >= 0:
                    needed[source] = True
    return needed


def _move_before(graph: Outline, operator: int, stages: list[int]) -> bool:
    """Moves it and all of the middle that it depends on before the middle; not if that is much."""
    most = min(_TAKEN_ALONG, len(graph) // _PART_TAKEN_ALONG)
    moved = [operator]
    for each in moved:  # which grows meanwhile
        for source in graph.sources[each]:
            if source < 0 or stages[source] == BEFORE or source in moved:
                continue
            if len(moved) > most:
                return False
            moved.append(source)
    for each in moved:
        stages[each] = BEFORE
    return True
