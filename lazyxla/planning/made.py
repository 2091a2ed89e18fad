"""The cut between tensors that were made on the device from no data, and what uses them.

    x = torch.randn(64, 10, device="lazyxla")   made before a loop, in its first step's graph:
    for _ in range(100):                        one program for the step, and a small one for x,
        loss = model(x).sum()                   in place of one for the first step and one for
        ...                                     all others

A tensor may be such data if it is alive when its graph runs, and was made before anything in it was
computed from data. Steps may have written to it since: a sum, a queue. (That a loop draws it in
each step shows only when the graph recurs.)
"""

from __future__ import annotations

from lazyxla.planning.outline import Outline

_FEWEST = 16  # operators that use them: a smaller program is compiled in tens of milliseconds


def find_made(graph: Outline) -> list[int]:
    """The stage of each operator: 0 if it makes such tensors, 1 otherwise. An empty list if there
    are none, or few operators besides."""
    stages = [1] * len(graph)
    makers = graph.makers()
    for value in graph.made:
        stages[makers[value]] = 0
    for i in reversed(range(len(graph))):
        if stages[i] == 0:
            for source in graph.sources[i]:
                stages[source] = 0
    sizes = zip(graph.operators, stages, strict=True)
    size = sum(operator.size for operator, stage in sizes if stage == 1)
    return stages if 0 in stages and size >= _FEWEST else []
