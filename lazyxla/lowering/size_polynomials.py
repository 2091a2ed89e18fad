"""Numbers that depend on sizes, found from examples.

A program is lowered for several sizes of its symbolic dimensions. Each number in it, such as a
dimension or a limit of a slice, has then a value for each of them: `Points.fit` finds the
polynomial with whole coefficients that gives all these values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

Monomial = tuple[int, ...]
"""The exponent of each variable."""


class Polynomial(NamedTuple):
    """A sum of monomials, each with a coefficient that is not 0. That of a constant is all there is
    of it: ``((0, ...), c)``, or nothing for 0."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def constant(self) -> int | None:
        """Its value, if it depends on no variable."""
        if not self.terms:
            return 0
        ((monomial, coefficient), *more) = self.terms
        return None if more or any(monomial) else coefficient

    def at(self, sizes: Sequence[int]) -> int:
        """Its value for a size of each variable."""
        return sum(c * math.prod(map(pow, sizes, monomial)) for monomial, c in self.terms)


class Points:
    """The sizes for which a program is lowered: some more than a polynomial has coefficients.

    Attributes:
        sizes: one for each variable, at each point.
    """

    def __init__(self, bounds: Sequence[tuple[int, int]], least: int = 2) -> None:
        """For variables between these bounds: sizes of at least `least`, if they may.

        Raises:
            ValueError: there are too few sizes between the bounds of one.
        """
        self._monomials = _monomials(len(bounds))
        choices = [_spread(low, high, least) for low, high in bounds]
        self._found: dict[tuple[int, ...], Polynomial | None] = {}
        self.sizes, self._inverse = self._independent(choices)

    def _independent(
        self, choices: list[list[int]]
    ) -> tuple[list[tuple[int, ...]], list[list[Fraction]]]:
        """Points whose first ones determine a polynomial, and its coefficients as functions of the
        values there. One more point checks whether there is one."""
        found: list[tuple[int, ...]] = []
        reduced: list[list[Fraction]] = []
        rest: list[tuple[int, ...]] = []
        for point in sorted(itertools.product(*choices), key=sum):
            row = self._row(point)
            for other in reduced:
                lead = next(i for i, x in enumerate(other) if x)
                factor = row[lead] / other[lead]
                row = [x - factor * y for x, y in zip(row, other, strict=True)]
            if any(row) and len(found) < len(self._monomials):
                reduced.append(row)
                found.append(point)
            else:
                rest.append(point)
        if len(found) < len(self._monomials) or not rest:
            raise ValueError("a symbolic dimension needs at least four sizes between its bounds")
        inverse = _inverse([self._row(point) for point in found])
        return [*found, rest[-1]], inverse

    def _row(self, point: Sequence[int]) -> list[Fraction]:
        return [Fraction(math.prod(map(pow, point, m))) for m in self._monomials]

    def fit(self, values: Sequence[int]) -> Polynomial | None:
        """The polynomial with these values, one for each point; None if there is none."""
        key = tuple(values)
        if key not in self._found:
            self._found[key] = self._fit(key)
        return self._found[key]

    def _fit(self, values: tuple[int, ...]) -> Polynomial | None:
        if len(set(values)) == 1:
            terms = [(self._monomials[0], values[0])]
        else:
            terms = []
            for monomial, row in zip(self._monomials, self._inverse, strict=True):
                exact = sum(x * y for x, y in zip(row, values, strict=False))
                if exact.denominator != 1:
                    return None
                terms.append((monomial, int(exact)))
        found = Polynomial(tuple((m, c) for m, c in terms if c))
        same = all(found.at(s) == v for s, v in zip(self.sizes, values, strict=True))
        return found if same else None


def _monomials(variables: int) -> list[Monomial]:
    """Products of different variables, and squares; 1 is the first."""
    products = sorted(itertools.product((0, 1), repeat=variables), key=sum)
    units = [tuple(2 * (i == j) for i in range(variables)) for j in range(variables)]
    return [*products, *units]


def _spread(low: int, high: int, least: int) -> list[int]:
    """Four sizes within bounds, even and odd ones; at least `least` if that is possible."""
    wanted = [max(low, least) + step for step in (1, 4, 9, 18)]
    if wanted[-1] > high:
        step = max(1, (high - max(low, least)) // 3)
        wanted = [high - i * step for i in (3, 2, 1, 0)]
    return [size for size in wanted if size >= low]


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Of an invertible square matrix, by Gauss and Jordan's elimination."""
    n = len(matrix)
    rows = [[*row, *(Fraction(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i in range(n):
        pivot = next(j for j in range(i, n) if rows[j][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(n):
            if j != i and rows[j][i]:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    return [row[n:] for row in rows]
