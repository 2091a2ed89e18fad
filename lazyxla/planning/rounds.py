"""The cut of a graph that holds many rounds of a loop, since the loop has no sync in it.

    for t in timesteps:              50 rounds of the same operators on the same weights: one
        x = step(model(x, t), t, x)  program that runs 50 times, in place of one of 50 models
    x.cpu()

A loop differs from a deep model in that its rounds take the same inputs, or none: layers have
weights of their own. A program ends where it hands the fewest values on.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate
from typing import NamedTuple

from lazyxla.planning.outline import Outline

MANY = 1024  # operators: a smaller graph is compiled in seconds
_FEWEST = 128  # that a program of rounds has, so that running it takes longer than starting it
_LEAST_COUNT = 3
_ALIKE = 0.9
"""The least part of a round that is as in the round before: each may have an input of its own, such
as a batch."""
_RUN = 8
_TRIED = 8


class Rounds(NamedTuple):
    """`stages`: of each operator; a round or several of them are one.
    `operators`: of such a stage. `times`: how many such stages."""

    stages: list[int]
    operators: int
    times: int


class _Range(NamedTuple):
    begin: int = 0
    end: int = 0

    @property
    def size(self) -> int:
        return self.end - self.begin


def find_rounds(graph: Outline) -> Rounds | None:
    """The rounds of a graph; None if there are none, or it is too small."""
    if len(graph) < MANY:
        return None
    symbols = _symbols(graph)
    period, found = _find_period(symbols)
    if period == 0:
        return None
    size = -(-_FEWEST // period) * period
    if found.size < _LEAST_COUNT * size or found.size * 2 < len(graph):
        return None
    crossings = _crossings(graph)
    # Among equally good positions the one from which the sequence of operators is the first in
    # order: it does not depend on where in a round the graph begins.
    begins = range(found.begin, found.begin + period)
    fewest = min(crossings[begin + size] for begin in begins)
    first = min(
        (begin for begin in begins if crossings[begin + size] == fewest),
        key=lambda begin: graph.ids[begin : begin + period],
    )
    if not _follows(graph, first + size, size):
        return None  # alike, but no loop
    count = (found.end - first) // size
    if count < _LEAST_COUNT:
        return None
    before = 1 if first > 0 else 0
    stages = [0] * first
    stages += [before + min(i // size, count) for i in range(len(graph) - first)]
    return Rounds(stages, size, count)


def _symbols(graph: Outline) -> list[int]:
    """Of each operator what is the same in every round: its kind, and which inputs it takes."""
    numbers: dict[tuple[int, ...], int] = {}
    inputs = len(graph.inputs)
    return [
        numbers.setdefault(
            (id, *(value if value < inputs else -1 for value in operands)), len(numbers)
        )
        for id, operands in zip(graph.ids, graph.operands, strict=True)
    ]


def _find_period(symbols: list[int]) -> tuple[int, _Range]:
    """After how many symbols they recur, and in which range; 0 if they do not."""
    period, longest = 0, _Range()
    for distance in _distances(symbols):
        found = _longest_range(symbols, distance)
        # A multiple of a period is one, too, with a range hardly longer.
        tolerance = max(period, distance)
        is_longer = found.size > longest.size + tolerance
        is_shorter = distance < period and found.size + tolerance >= longest.size
        if is_longer or is_shorter:
            period, longest = distance, found
    return period, longest


def _distances(symbols: list[int]) -> list[int]:
    """Distances at which runs of symbols recur, the most frequent first."""
    last: dict[tuple[int, ...], int] = {}
    counts: Counter[int] = Counter()
    for i in range(len(symbols) - _RUN + 1):
        run = tuple(symbols[i : i + _RUN])
        if run in last:
            counts[i - last[run]] += 1
        last[run] = i
    by_count = sorted(counts, key=lambda distance: (counts[distance], distance), reverse=True)
    return by_count[:_TRIED]


def _longest_range(symbols: list[int], period: int) -> _Range:
    """The longest range in which the symbols recur after `period`."""
    pairs = zip(symbols, symbols[period:], strict=False)
    same = list(accumulate((a == b for a, b in pairs), initial=0))  # among the first i
    longest = _Range()
    begin, last = 0, -2  # of the run of positions from which a round is alike
    for i in range(len(symbols) - 2 * period + 1):
        if same[i + period] - same[i] < _ALIKE * period:
            continue
        if last != i - 1:
            begin = i
        last = i
        if last + 2 * period - begin > longest.size:
            longest = _Range(begin, last + 2 * period)
    return longest


def _crossings(graph: Outline) -> list[int]:
    """Per position, how many operators' results are made before and used from there on."""
    last_use = [0] * len(graph)
    for i, sources in enumerate(graph.sources):
        for source in sources:
            if source >= 0:
                last_use[source] = i
    change = [0] * (len(graph) + 2)
    for i, last in enumerate(last_use):
        if last > i:
            change[i + 1] += 1
            change[last + 1] -= 1
    return list(accumulate(change))


def _follows(graph: Outline, begin: int, size: int) -> bool:
    """Whether something in a range takes a result of one in the range of the same size before."""
    return any(
        begin - size <= source < begin
        for sources in graph.sources[begin : begin + size]
        for source in sources
        if source >= 0
    )
