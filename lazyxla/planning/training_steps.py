"""The cut of a graph that holds several steps of a training, since not each step ends in a sync.

    for i, (x, y) in enumerate(batches):     ten steps, whose batches may have any of two sizes:
        step(x, y)                           one program for each size, in place of one for each
        if i % 10 == 9: log(loss.item())     of 1,024 combinations of them

A step ends with the optimizer's updates: what reads a parameter after them is the next step's, if
anything there comes from elsewhere, as a batch does. An optimizer may itself compute with what it
has updated, such as the matrices that it multiplies gradients by.
"""

from __future__ import annotations

from lazyxla.planning.outline import Outline

_FEWEST = 3
"""Two may be one for the user, whose two models are updated in turn."""
_SMALL = 16
"""Operators of a step, on the average: the program of a smaller one takes longer to start."""


def find_training_steps(graph: Outline) -> list[int]:
    """The step that each operator belongs to, from 0 on; an empty list if there are too few."""
    is_update = _updates(graph)
    steps = [0] * len(graph)
    for i, sources in enumerate(graph.sources):
        for source in sources:
            if source >= 0:
                is_next = is_update[source] and not is_update[i]
                steps[i] = max(steps[i], steps[source] + is_next)
    if _count(steps, is_update) < _FEWEST:
        return []
    depends = _depend_on_parameters(graph, is_update)
    steps = _join(steps, _read_batches(graph, is_update, depends, steps))
    count = _count(steps, is_update)
    if count < _FEWEST or sum(operator.size for operator in graph.operators) < _SMALL * count:
        return []
    _move_to_their_users(graph, is_update, depends, steps)
    return steps


def _count(steps: list[int], is_update: list[bool]) -> int:
    return 1 + max((step for step, update in zip(steps, is_update) if update), default=0)


def _updates(graph: Outline) -> list[bool]:
    """Which operators update parameters: the optimizer's, and those of their results alone."""
    is_update: list[bool] = []
    for operator, sources in zip(graph.operators, graph.sources, strict=True):
        of_updates = bool(sources) and all(s >= 0 and is_update[s] for s in sources)
        is_update.append(operator.in_optimizer or of_updates)
    return is_update


def _depend_on_parameters(graph: Outline, is_update: list[bool]) -> list[bool]:
    """Per value: whether it is a parameter, or computed from one."""
    depends = [False] * len(graph.inputs)
    for operands, update in zip(graph.operands, is_update, strict=True):
        for value in operands:
            if update and value < len(graph.inputs):
                depends[value] = True
    for operator, operands, update in zip(graph.operators, graph.operands, is_update, strict=True):
        depends += [update or any(depends[value] for value in operands)] * operator.results
    return depends


def _read_batches(
    graph: Outline, is_update: list[bool], depends: list[bool], steps: list[int]
) -> set[int]:
    """The steps in which anything is computed from what no parameter leads to."""
    return {
        step
        for operands, update, step in zip(graph.operands, is_update, steps, strict=True)
        if not update and not all(depends[value] for value in operands)
    }


def _join(steps: list[int], apart: set[int]) -> list[int]:
    """Joins to the step before each that is not in `apart`."""
    joined = [0]
    for step in range(1, max(steps) + 1):
        joined.append(joined[-1] + (step in apart))
    return [joined[step] for step in steps]


def _move_to_their_users(
    graph: Outline, is_update: list[bool], depends: list[bool], steps: list[int]
) -> None:
    """Moves what no earlier update leads to, such as random numbers and what is made of a batch
    alone, to the first step that reads it; and updates that only others read, such as the decay of
    a parameter before its gradient is known."""
    makers = graph.makers()
    bound = {maker for maker, depend in zip(makers, depends, strict=True) if depend}
    is_output = {makers[output] for output in graph.outputs}
    first_user: dict[int, int] = {}
    has_other_users = [False] * len(graph)
    for i in reversed(range(len(graph))):
        may_move = not has_other_users[i] if is_update[i] else i not in bound
        if may_move and i in first_user and i not in is_output:
            steps[i] = first_user[i]
        for source in graph.sources[i]:
            if source >= 0:
                first_user[source] = min(first_user.get(source, steps[i]), steps[i])
                has_other_users[source] = has_other_users[source] or not is_update[i]
