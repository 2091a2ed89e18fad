"""The cut of a graph in which some sizes are data: between what depends on them and what does not.

    y = model(x)                  the same in each step
    loss = criterion(y[found])    as many rows as this step's data has
    loss.backward()               the same in each step, but for the loss

So it runs as several programs, alternately of what is the same, which are compiled once, and of
what has other sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lazyxla.planning.outline import Outline

_LEAST_ALIKE = 0.1
"""The least part of a graph that must be the same. An estimate: a part that is compiled once saves
its compilation in each step with a new size, and costs some microseconds to start."""

_SMALL = 16
"""Operators: what is the same in fewer is compiled with what has other sizes around it."""

_MOST_ALIKE = 8
"""How many programs of what is the same there may be; smaller ones are joined to what differs."""

_MOST_STEPS = 3
"""Operators in a row that may be moved."""
_FAR = _MOST_STEPS + 1


class Cut(NamedTuple):
    """How a graph is cut, by its operators.

    Args:
        stages: of each operator; the even ones are those of what differs.
        differs: which operators differ, or are compiled with those that do.
    """

    stages: list[int]
    differs: list[bool]


def find_alternate_stages(graph: Outline, differs: list[bool]) -> Cut | None:
    """The best cut; None if the graph is better left whole.

    Args:
        differs: which operators no earlier graph had.
    """
    sizes = [operator.size for operator in graph.operators]
    while True:
        stages = _stages(graph, differs)
        in_stage: Counter[int] = Counter()
        for stage, size in zip(stages, sizes, strict=True):
            in_stage[stage] += size
        alike = sorted((stage for stage in in_stage if stage % 2 == 1), key=in_stage.__getitem__)
        large = [stage for stage in alike[-_MOST_ALIKE:] if in_stage[stage] >= _SMALL]
        if large == alike:
            break
        joined = set(alike) - set(large)
        differs = [each or stage in joined for each, stage in zip(differs, stages, strict=True)]
    size = sum(in_stage[stage] for stage in alike)
    if len(in_stage) == 1 or size < _LEAST_ALIKE * sum(sizes):
        return None
    return Cut(stages, differs)


def _stages(graph: Outline, differs: Sequence[bool]) -> list[int]:
    """The first stage that each can run in: odd ones are of what is alike."""
    stages: list[int] = []
    for sources, each in zip(graph.sources, differs, strict=True):
        stage = max((stages[source] for source in sources if source >= 0), default=1)
        stages.append(stage + (stage % 2 == each))
    _move_to_their_users(graph, differs, stages)
    return stages


def _move_to_their_users(graph: Outline, differs: Sequence[bool], stages: list[int]) -> None:
    """Moves what is made from one input or none, such as the transpose of a parameter, to the
    stage that first takes it, so that its result is not handed on. What no operator takes goes to
    the largest stage."""
    alike = Counter(stage for stage in stages if stage % 2 == 1)
    largest = max(alike, key=alike.__getitem__, default=0)
    steps: list[int] = []  # from the input
    for sources, each in zip(graph.sources, differs, strict=True):
        before = max((steps[source] for source in sources if source >= 0), default=0)
        steps.append(_FAR if each or len(sources) > 1 else before + 1)
    first_user: dict[int, int] = {}
    for i in reversed(range(len(graph))):
        if steps[i] <= _MOST_STEPS:
            stages[i] = first_user.get(i, largest)
        for source in graph.sources[i]:
            if source >= 0:
                first_user[source] = min(first_user.get(source, stages[i]), stages[i])
