"""The cut of a graph that holds several steps of a training, since not each step ends in a sync.

    for i, (x, y) in enumerate(batches):     ten steps, whose batches may have any of two sizes:
        step(x, y)                           one program for each size, in place of one for each
        if i % 10 == 9: log(loss.item())     of 1,024 combinations of them

A step ends with the optimizer's updates: what reads a parameter after them is the next step's.
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
    count = 1 + max((step for step, update in zip(steps, is_update) if update), default=0)
    if count < _FEWEST or sum(operator.size for operator in graph.operators) < _SMALL * count:
        return []
    _move_to_their_users(graph, is_update, steps)
    return steps


def _updates(graph: Outline) -> list[bool]:
    """Which operators update parameters: the optimizer's, and those of their results alone."""
    is_update: list[bool] = []
    for operator, sources in zip(graph.operators, graph.sources, strict=True):
        of_updates = bool(sources) and all(s >= 0 and is_update[s] for s in sources)
        is_update.append(operator.in_optimizer or of_updates)
    return is_update


def _move_to_their_users(graph: Outline, is_update: list[bool], steps: list[int]) -> None:
    """Moves what no earlier update leads to, such as random numbers and what is made of a batch
    alone, to the first step that reads it; and updates that only others read, such as the decay of
    a parameter before its gradient is known."""
    inputs = len(graph.inputs)
    updated = {
        value
        for operands, update in zip(graph.operands, is_update, strict=True)
        for value in operands
        if update and value < inputs
    }
    depends: list[bool] = []
    for operands, sources in zip(graph.operands, graph.sources, strict=True):
        of_parameters = any(value in updated for value in operands)
        of_others = any(s >= 0 and (depends[s] or is_update[s]) for s in sources)
        depends.append(of_parameters or of_others)
    makers = graph.makers()
    is_output = {makers[output] for output in graph.outputs}
    first_user: dict[int, int] = {}
    has_other_users = [False] * len(graph)
    for i in reversed(range(len(graph))):
        may_move = not has_other_users[i] if is_update[i] else not depends[i]
        if may_move and i in first_user and i not in is_output:
            steps[i] = first_user[i]
        for source in graph.sources[i]:
            if source >= 0:
                first_user[source] = min(first_user.get(source, steps[i]), steps[i])
                has_other_users[source] = has_other_users[source] or not is_update[i]
