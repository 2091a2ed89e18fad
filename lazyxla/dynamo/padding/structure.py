"""What the dimensions of a padded tensor consist of.

A dimension is an ordered product of factors, each a number or an expression of symbols: flattening
``[4, s0]`` gives the one dimension ``(4, s0)``, flattening ``[s0, 4]`` gives ``(s0, 4)``. An index
has a digit for each factor, the last one fastest. In a padded tensor every factor has the size of
its bucket, and an element is true if each of its digits is below the factor's true size. So the two
dimensions above have the same size, and their true elements are at different positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice, permutations
from itertools import product as cartesian
from math import gcd
from typing import Any, TypeAlias

import sympy
from torch.utils._sympy import functions

Factor: TypeAlias = Any
"""An int, or one of sympy's expressions (which has no types)."""
Dim: TypeAlias = tuple[Factor, ...]
Structure: TypeAlias = tuple[Dim, ...]

_MOST_ORDERS = 64  # of the factors of uniform dimensions that are tried


class UniformDim(tuple[Factor, ...]):
    """A dimension along which all elements are the same: its factors may have any order."""

    __slots__ = ()


class NotPaddableError(Exception):
    """Padding might change what an operator computes; the text says why."""


def expression(size: Any) -> Factor:
    """A size as a number, or as an expression in which what can be factored out is."""
    expr = size.node.expr if hasattr(size, "node") else size
    if isinstance(expr, int) or expr.is_Integer:
        return int(expr)
    return sympy.factor(expr) if expr.is_Add else expr


def product(factors: Iterable[Factor]) -> Factor:
    result: Any = 1
    for factor in factors:
        result = result * factor
    return expression(result)


def joined(factors: Iterable[Factor]) -> Dim:
    """Factors without ones, with numbers that follow each other as one."""
    result: list[Factor] = []
    for factor in factors:
        if isinstance(factor, int) and result and isinstance(result[-1], int):
            result[-1] *= factor
        elif factor != 1:
            result.append(factor)
    return tuple(result)


def _atoms(size: Factor) -> tuple[int, Counter[Any]]:
    """A size as a number times expressions that are no products."""
    number, atoms = 1, Counter[Any]()
    parts: Iterable[Factor] = [size] if isinstance(size, int) else sympy.Mul.make_args(size)
    for part in parts:
        base, power = part, 1
        if getattr(part, "is_Pow", False) and part.exp.is_Integer and part.exp > 0:
            base, power = part.base, int(part.exp)
        if isinstance(base, int) or base.is_Integer:
            number *= int(base) ** power
        else:
            atoms[base] += power
    return number, atoms


def of_size(size: Any) -> Dim:
    """The dimension of a tensor from outside: padded at its end."""
    number, atoms = _atoms(expression(size))
    if sum(atoms.values()) > 1:
        raise NotPaddableError(f"a tensor of size {size} may be padded in several ways")
    return joined([*atoms, number])


def uniform(size: Any) -> Dim:
    """A dimension of a tensor that is the same everywhere, of any size."""
    number, atoms = _atoms(expression(size))
    return UniformDim(joined([*sorted(atoms.elements(), key=str), number]))


def of_shape(shape: Iterable[Any]) -> Structure:
    return tuple(of_size(size) for size in shape)


def has_symbol(value: Any, symbols: frozenset[Any]) -> bool:
    """Whether a factor, an expression or a list of them has one of the symbols."""
    if isinstance(value, (list, tuple)):
        return any(has_symbol(v, symbols) for v in value)
    return bool(symbols.intersection(getattr(value, "free_symbols", ())))


_MONOTONE = (
    *(sympy.Add, functions.Max, functions.Min, functions.ToFloat, functions.FloorToInt),
    *(functions.CeilToInt, functions.TruncToInt, functions.RoundToInt),
)
_QUOTIENTS = (functions.FloorDiv, functions.IntTrueDiv, functions.FloatTrueDiv)


def grows(size: Factor, symbols: frozenset[Any], sign: int = 1) -> bool:
    """Whether a size, times a sign, is surely no less where the symbols are more.

    Only then are its true elements among those of the bucket.
    """
    if not has_symbol(size, symbols):
        return True
    if size.is_Symbol:
        return sign > 0
    if isinstance(size, _MONOTONE):
        return all(grows(part, symbols, sign) for part in size.args)
    if size.is_Mul:
        number, rest = size.as_coeff_Mul()
        if number != 1:
            return grows(rest, symbols, sign if number > 0 else -sign)
        return all(part.is_nonnegative and grows(part, symbols, sign) for part in size.args)
    if size.is_Pow:
        positive = size.base.is_nonnegative and size.exp.is_number and size.exp > 0
        return bool(positive) and grows(size.base, symbols, sign)
    if isinstance(size, _QUOTIENTS):
        number, divisor = size.args
        positive = divisor.is_positive and not has_symbol(divisor, symbols)
        return bool(positive) and grows(number, symbols, sign)
    return False


def _segments(factors: Iterable[Factor], padded: frozenset[Any]) -> list[Any]:
    """Padded factors, and what is between them: a number and the expressions times it."""
    result: list[Any] = []
    for factor in factors:
        if has_symbol(factor, padded):
            result.append(factor)
            continue
        number, atoms = _atoms(factor)
        if result and isinstance(result[-1], tuple):
            before, others = result.pop()
            number, atoms = number * before, atoms + others
        if number != 1 or atoms:
            result.append((number, atoms))
    return result


def split(factors: Iterable[Factor], shape: Iterable[Any], padded: frozenset[Any]) -> Structure:
    """The same factors in the same order as dimensions of another shape.

    Between padded ones the order does not matter, as all of these elements are true.
    """
    waiting = _segments(factors, padded)
    sizes = [expression(size) for size in shape]
    result: list[Dim] = []
    for i, size in enumerate(sizes):
        if not any(not isinstance(w, tuple) for w in waiting) and not has_symbol(sizes[i:], padded):
            return (*result, *((s,) if s != 1 else () for s in sizes[i:]))
        number, atoms = _atoms(size)
        taken: list[Factor] = []
        while number != 1 or atoms:
            front = waiting.pop(0) if waiting else (1, Counter[Any]())
            if isinstance(front, tuple):
                common, same = gcd(front[0], number), front[1] & atoms
                if common == 1 and not same:
                    raise NotPaddableError("regroups elements")
                number, atoms = number // common, atoms - same
                rest = front[0] // common, front[1] - same
                if rest[0] != 1 or rest[1]:
                    waiting.insert(0, rest)
                taken += [*same.elements(), common]
            elif atoms[front] > 0:
                atoms = atoms - Counter({front: 1})
                taken.append(front)
            else:
                raise NotPaddableError("regroups elements")
        result.append(joined(taken))
    if waiting:
        raise NotPaddableError("regroups elements")
    return tuple(result)


def view(given: Structure, shape: Iterable[Any], padded: frozenset[Any]) -> Structure:
    """The structure of a tensor as another shape."""
    shape = list(shape)
    orders = [permutations(dim) if isinstance(dim, UniformDim) else [dim] for dim in given]
    refused = NotPaddableError("regroups elements")
    for dims in islice(cartesian(*orders), _MOST_ORDERS):
        try:
            result = split([factor for dim in dims for factor in dim], shape, padded)
        except NotPaddableError as error:
            refused = error
            continue
        free = all(isinstance(dim, UniformDim) or not dim for dim in given)
        return tuple(map(UniformDim, result)) if free else result
    raise refused


def plain(given: Structure) -> Structure:
    """A structure whose dimensions all have an order."""
    return tuple(tuple(dim) for dim in given)


def broadcast(structures: Iterable[Structure], padded: frozenset[Any]) -> Structure:
    """The structure of what element-wise operators make of such operands."""
    result: list[Dim] = []
    for structure in structures:
        given = list(structure)
        rank = max(len(result), len(given))
        result = [()] * (rank - len(result)) + result
        given = [()] * (rank - len(given)) + given
        for i, (ours, theirs) in enumerate(zip(result, given, strict=True)):
            if not ours or (theirs and isinstance(ours, UniformDim)):
                ours, theirs = theirs, ours
            decided = not theirs or isinstance(theirs, UniformDim) or ours == theirs
            if not decided and has_symbol([ours, theirs], padded):
                raise NotPaddableError("combines tensors that are padded differently")
            result[i] = ours
    return tuple(result)


def reduced(structure: Structure, dims: Iterable[int], keepdim: bool) -> Structure:
    """A structure without dimensions, or with one element in each of them."""
    gone = set(dims)
    kept = [() if i in gone else dim for i, dim in enumerate(structure)]
    return tuple(dim for i, dim in enumerate(kept) if keepdim or i not in gone)
