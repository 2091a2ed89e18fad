"""The cut of a graph at its collectives, and the groups of processes that run a program together
(csrc/program/replicas.h)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from lazyxla.planning.outline import Outline


def cut_at_collectives(graph: Outline) -> list[int]:
    """The stage of each operator. Collectives have the odd ones, in their order; all else runs as
    early as it can."""
    stages: list[int] = []
    next_collective = 1
    for operator, sources in zip(graph.operators, graph.sources, strict=True):
        stage = max((_even(stages[source] + 1) for source in sources if source >= 0), default=0)
        if operator.is_collective:
            stage = max(stage + 1, next_collective)
            next_collective = stage + 2
        stages.append(stage)
    _move_light_operators(graph, stages)
    return stages


def _even(stage: int) -> int:
    return stage & ~1


def _move_light_operators(graph: Outline, stages: list[int]) -> None:
    """Moves them to the first stage that reads them, so that their values are not handed on: a
    transposed weight, say, which a matmul reads without a copy."""
    light = _light_operators(graph)
    makers = graph.makers()
    made_for_others = {makers[output] for output in graph.outputs}
    wanted: dict[int, int] = {}  # the first stage that reads an operator's results
    for i in reversed(range(len(graph))):
        if light[i] and i in wanted and i not in made_for_others:
            stages[i] = wanted[i]
        for source in graph.sources[i]:
            if source >= 0:  # an operand of a collective is made before it
                wanted[source] = min(wanted.get(source, stages[i]), _even(stages[i]))


def _light_operators(graph: Outline) -> list[bool]:
    """Those that depend on no computed value: numbers, and views of inputs."""
    light: list[bool] = []
    for operator, sources in zip(graph.operators, graph.sources, strict=True):
        is_view = not sources or operator.name == "lazyxla::view"
        light.append(is_view and all(source < 0 or light[source] for source in sources))
    return light


class ReplicaGroups(NamedTuple):
    """`ranks`: of all processes that run a program, ascending; each is a replica.
    `rows`: for each group, all of its kind, by replica."""

    ranks: list[int]
    rows: list[list[list[int]]]


def arrange(groups: Sequence[Sequence[int]]) -> ReplicaGroups | None:
    """The groups of a program that all of them run together: along the axes of a grid.

    A process knows the groups that it is in. If they are the rows of a grid through its own
    position, as those of a torch.distributed.DeviceMesh are, all other groups follow:

        of process 2:  {2, 3} and {0, 2}         0 1     along one axis {0, 1} and {2, 3},
                                                 2 3     along the other {0, 2} and {1, 3}

    A group may also be along several axes at once, such as that of all processes.

    Args:
        groups: the ranks of each group of one process. Those of other processes are not checked.

    Returns:
        None if they are no rows of a grid.
    """
    common = set.intersection(*map(set, groups))
    if not common or not all(map(_is_row, groups)):
        return None
    here = min(common)
    axes: list[Sequence[int]] = []
    for group in sorted(groups, key=len):
        if _reached(here, axes, group) != list(group):
            axes.append(group)
    axes.sort(key=_stride)
    reach = 1  # of the axes with smaller strides together
    for axis in axes:
        if _stride(axis) < reach:
            return None  # rows of both would cross
        reach = _stride(axis) * len(axis)
    ranks = _reached(here, axes)
    replica = {rank: position for position, rank in enumerate(ranks)}
    found = ReplicaGroups(ranks, [])
    for group in groups:
        if _reached(here, axes, group) != list(group):
            return None
        across = [axis for axis in axes if not set(axis) <= set(group)]
        offsets = [rank - here for rank in _reached(here, across)]
        found.rows.append([[replica[rank + offset] for rank in group] for offset in offsets])
    return found


def _is_row(group: Sequence[int]) -> bool:
    """Whether it ascends with one stride."""
    stride = _stride(group)
    return stride > 0 and all(b - a == stride for a, b in pairwise(group))


def _stride(group: Sequence[int]) -> int:
    return group[1] - group[0] if len(group) > 1 else 1


def _reached(
    here: int, axes: Sequence[Sequence[int]], within: Sequence[int] | None = None
) -> list[int]:
    """The ranks that are reached from `here` along the axes, ascending.

    Args:
        within: only along the axes that these ranks include.
    """
    reached = [here]
    for axis in axes:
        if within is None or set(axis) <= set(within):
            reached = [rank + other - here for rank in reached for other in axis]
    return sorted(reached)
