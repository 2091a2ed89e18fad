"""Which elements of one sequence correspond to those of another.

The shortest edit script from one to the other, by Myers' greedy algorithm ("An O(ND) Difference
Algorithm and Its Variations", 1986).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

_NOWHERE = -1
_CHUNK = 64


def align(now: Sequence[Hashable], before: Sequence[Hashable], most: int) -> list[int] | None:
    """Per element of `now` its index in `before`, -1 if it is not there.

    Args:
        most: of elements that only one of both has; with more, the result is None. Time and memory
            grow with most * (length + most).
    """
    if not _may_differ_by(now, before, most):
        return None
    reached = _Reached(len(now), len(before))
    goal = len(now) - len(before)
    edits = 0
    while True:
        reached.rows.append([_NOWHERE] * (2 * edits + 1))
        for diagonal in range(-edits, edits + 1, 2):
            index, _ = reached.step(edits, diagonal)
            if index != _NOWHERE:
                index += _common(now, before, index, index - diagonal)
                reached.rows[edits][diagonal + edits] = index
        if reached.at(edits, goal) == len(now):
            return _indices(reached, edits)
        if edits == min(most, len(now) + len(before)):
            return None
        edits += 1


def _may_differ_by(now: Sequence[Hashable], before: Sequence[Hashable], most: int) -> bool:
    """False if they are known to differ by more: by their elements, whatever the order."""
    if abs(len(now) - len(before)) > most:
        return False
    counts = Counter(now)
    counts.subtract(Counter(before))
    return sum(map(abs, counts.values())) <= most


def _common(now: Sequence[Hashable], before: Sequence[Hashable], i: int, j: int) -> int:
    """How many elements are the same from `i` and `j` on."""
    start = i
    while (chunk := now[i : i + _CHUNK]) and chunk == before[j : j + _CHUNK]:
        i, j = i + len(chunk), j + len(chunk)
    while i < len(now) and j < len(before) and now[i] == before[j]:
        i, j = i + 1, j + 1
    return i - start


class _Reached:
    """How far in `now` a number of edits leads, by diagonal: the index in `now` less that in
    `before`."""

    def __init__(self, now: int, before: int) -> None:
        self.now, self.before = now, before
        self.rows: list[list[int]] = []  # by the number of edits

    def at(self, edits: int, diagonal: int) -> int:
        return _NOWHERE if abs(diagonal) > edits else self.rows[edits][diagonal + edits]

    def step(self, edits: int, diagonal: int) -> tuple[int, bool]:
        """Where the last of `edits` edits leads to on this diagonal: the index in `now`, and
        whether it drops an element of `now`, or else one of `before`."""
        if edits == 0:
            return 0, False
        across, down = self.at(edits - 1, diagonal - 1), self.at(edits - 1, diagonal + 1)
        across = _NOWHERE if across in (_NOWHERE, self.now) else across + 1
        if down - diagonal > self.before:
            down = _NOWHERE
        return (across, True) if across > down else (down, False)


def _indices(reached: _Reached, edits: int) -> list[int]:
    indices = [-1] * reached.now
    index, diagonal = reached.now, reached.now - reached.before
    for left in range(edits, -1, -1):
        begin, drops_from_now = reached.step(left, diagonal)
        indices[begin:index] = range(begin - diagonal, index - diagonal)
        index = begin - drops_from_now
        diagonal += -1 if drops_from_now else 1
    return indices
