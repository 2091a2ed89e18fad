"""PyTorch's functions of arrays with symbolic dimensions (``jax.export.symbolic_shape``)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazyxla import lowering
from lazyxla.jax.torch_functions import TorchFunction
from lazyxla.lowering.dynamic_shapes import generalize
from lazyxla.lowering.size_polynomials import Points, Polynomial

_LARGEST = 1 << 20
"""No bound of a dimension is looked for beyond it."""

_LARGER = (30, 130)

Aval = tuple[torch.dtype, tuple[Any, ...]]


class Variables:
    """The variables of some symbolic shapes, and the sizes of them for which programs are made.

    Attributes:
        names: of the variables, sorted.
        bounds: the least and the largest size of each.
        points: sizes to begin with, small ones.
        larger: others, since rules may lower small and large sizes in different ways.
    """

    def __init__(self, shapes: Sequence[Sequence[Any]]) -> None:
        """Of shapes, at least one dimension of which is symbolic.

        Raises:
            ValueError: a variable's bounds are too close to each other.
        """
        from jax import export

        dims = [d for shape in shapes for d in shape if is_symbolic(d)]
        self.names: list[str] = sorted({name for d in dims for name in d.get_vars()})
        spec = ", ".join(self.names)
        self._dims = export.symbolic_shape(spec, scope=dims[0].scope)
        self.bounds = [_bounds(d) for d in self._dims]
        self.points = Points(self.bounds)
        self.larger = [Points(self.bounds, least) for least in _LARGER]

    def at(self, shape: Sequence[Any], point: Sequence[int]) -> tuple[int, ...]:
        """A shape with the sizes of a point."""
        env = dict(zip(self.names, point, strict=True))
        return tuple(int(d._evaluate(env) if is_symbolic(d) else d) for d in shape)

    def shape(self, shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
        """The symbolic shape that is these at the points.

        Raises:
            LoweringError: there is none whose dimensions are polynomials.
        """
        if len({len(shape) for shape in shapes}) > 1:
            raise lowering.LoweringError("lazyxla: the rank of a result depends on sizes")
        return tuple(self._dim(sizes) for sizes in zip(*shapes, strict=True))

    def _dim(self, sizes: Sequence[int]) -> Any:
        found = self.points.fit(sizes)
        if found is None:
            listed = ", ".join(map(str, sizes))
            raise lowering.LoweringError(
                f"lazyxla: a result's dimension is {listed} for sizes {self.points.sizes}, which "
                "is no polynomial of them"
            )
        return self._expression(found)

    def _expression(self, polynomial: Polynomial) -> Any:
        total: Any = 0
        for monomial, coefficient in polynomial.terms:
            term: Any = coefficient
            for dim, exponent in zip(self._dims, monomial, strict=True):
                for _ in range(exponent):
                    term = dim * term
            total = term + total
        return total


Sample = Callable[[tuple[int, ...]], TorchFunction]
"""From sizes of the variables to a function for these."""


class SymbolicFunction:
    """What :class:`TorchFunction` is for shapes that are known: one of them for any sizes.

    That PyTorch's derivatives and batches do the same for all sizes is taken for granted, where the
    function itself does (`check_guards`).
    """

    def __init__(
        self,
        variables: Variables,
        sample: Sample,
        derived_from: tuple[SymbolicFunction, tuple[int, ...]] | None = None,
    ) -> None:
        """Of a function's forms.

        Raises:
            LoweringError: they do not follow from the sizes.
        """
        self.variables = variables
        self.random = False
        self.derived_from = derived_from
        self._sample = functools.cache(sample)
        samples = self._at(variables.points)
        if samples[0].random:
            raise lowering.LoweringError(
                "lazyxla: a function of symbolic dimensions cannot draw random numbers"
            )
        self.inputs = self._avals([f.inputs for f in samples])
        self.outputs = self._avals([f.outputs for f in samples])
        self.differentiable_outputs = samples[0].differentiable_outputs
        self._modules: dict[str, bytes] = {}

    def check_ones(self) -> None:
        """Checks that the results' shapes follow for sizes of 1, where dimensions may vanish.

        Raises:
            LoweringError: they do not.
        """
        for i, (least, _) in enumerate(self.variables.bounds):
            if least > 1:
                continue
            middle = self.variables.points.sizes[0]
            point = (*middle[:i], 1, *middle[i + 1 :])
            for (_, shape), (_, found) in zip(self.outputs, self._sample(point).outputs):
                expected = self.variables.at(shape, point)
                if expected != found:
                    raise lowering.DifferentProgramsError(
                        f"lazyxla: for the size {self.variables.names[i]}=1 a result's shape is "
                        f"{list(found)}, not {list(expected)} as for others"
                    )

    @property
    def size_names(self) -> list[str]:
        """The variables whose sizes the module's `main` takes behind its arguments."""
        return self.variables.names

    def bytecode(self, platform: str) -> bytes:
        """Its module of StableHLO, whose function `main` it is; see `generalize`.

        Raises:
            LoweringError: it is another program for other sizes.
        """
        found = self._modules.get(platform)
        if found is None:  # made without a lock, see FlatFunction.bytecode
            found = self._modules.setdefault(platform, self._generalized(platform))
        return found

    def _generalized(self, platform: str) -> bytes:
        bounds = self.variables.bounds
        errors: list[lowering.LoweringError] = []
        ways = [(points, False) for points in (self.variables.points, *self.variables.larger)]
        for points, any_sizes in (*ways, (self.variables.points, True)):
            try:
                modules = [f.bytecode(platform, any_sizes) for f in self._at(points)]
                return generalize(modules, points, bounds)
            except lowering.DifferentProgramsError as error:
                errors.append(error)
        raise errors[-1]

    def _at(self, points: Points) -> list[TorchFunction]:
        return [self._sample(point) for point in points.sizes]

    def pullback(self, variables: tuple[int, ...]) -> SymbolicFunction:
        return SymbolicFunction(self.variables, lambda at: self._sample(at).pullback(variables))

    def pushforward(self, variables: tuple[int, ...]) -> SymbolicFunction:
        return SymbolicFunction(
            self.variables, lambda at: self._sample(at).pushforward(variables), (self, variables)
        )

    def batched(self, axes: tuple[int | None, ...], size: Any) -> SymbolicFunction:
        # The number of samples may be a variable that the shapes do not have.
        variables = Variables([*(shape for _, shape in self.inputs), (size,)])
        known = [variables.names.index(name) for name in self.variables.names]

        def sample(point: tuple[int, ...]) -> TorchFunction:
            function = self._sample(tuple(point[i] for i in known))
            return function.batched(axes, variables.at((size,), point)[0])

        return SymbolicFunction(variables, sample)

    def _avals(self, listed: Sequence[Sequence[Aval]]) -> tuple[Aval, ...]:
        if len({len(avals) for avals in listed}) > 1:
            raise lowering.LoweringError("lazyxla: how many results there are depends on sizes")
        return tuple(
            (same[0][0], self.variables.shape([shape for _, shape in same]))
            for same in zip(*listed, strict=True)
        )


def is_symbolic(dim: Any) -> bool:
    """Whether a dimension is one of JAX's expressions, not a number."""
    return hasattr(dim, "get_vars")


def shape_key(shape: Sequence[Any]) -> tuple[Any, ...]:
    """A shape as a key: variables of the same name are others in another scope."""
    return tuple((str(d), d.scope) if is_symbolic(d) else d for d in shape)


def _bounds(dim: Any) -> tuple[int, int]:
    """The bounds of a variable according to its scope."""
    import jax

    def holds(compare: Callable[[Any, int], bool], number: int) -> bool:
        try:
            return compare(dim, number)
        except jax.errors.InconclusiveDimensionOperation:
            return False

    lowest = 1
    while lowest < _LARGEST and holds(operator.ge, lowest + 1):
        lowest += 1
    low, high = lowest, _LARGEST
    while low < high:
        middle = (low + high) // 2
        if holds(operator.le, middle):
            high = middle
        else:
            low = middle + 1
    return lowest, high
