"""Modules with symbolic dimensions, made of modules for several sizes of them.

Rules know their shapes. So a program with symbolic dimensions is lowered at some points (sizes of
its variables, see `size_polynomials`), and the modules must differ in numbers only: each is then a
polynomial of the sizes. The module for the first point becomes the one for all. What depends on
sizes in it is computed from them:

    %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<8xf32>) -> tensor<5x8xf32>
    %1 = stablehlo.dynamic_broadcast_in_dim %b, %shape, dims = [1]
         : (tensor<8xf32>, tensor<2xi64>) -> tensor<?x8xf32>

The last arguments of its functions are the sizes, tensor<i64>. XLA compiles no such module: JAX's
refinement makes one for given sizes of it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

from lazyxla.lowering.dynamic_operations import REWRITES, STATIC
from lazyxla.lowering.errors import DifferentProgramsError
from lazyxla.lowering.mlir import Mlir, entered
from lazyxla.lowering.refinement import check_sizes
from lazyxla.lowering.size_polynomials import Points, Polynomial

_LARGEST = 1 << 16
"""No larger size is checked, whose tensors may have more elements than there can be."""

Bounds = Sequence[tuple[int, int]]
"""The least and the largest size of each variable."""


def generalize(modules: Sequence[bytes], points: Points, bounds: Bounds) -> bytes:
    """One module of those that were lowered at the points, in bytecode, for all sizes in bounds.

    What rules decide by sizes is then as they decided at the points. That shapes fit each other for
    other sizes, too, is checked for some.

    Raises:
        DifferentProgramsError: the modules differ in more than what follows from the sizes, or what
            follows does not hold for other sizes.
    """
    with entered() as world:
        parsed = [world.ir.Module.parse(module) for module in modules]
        functions = [list(module.body.operations) for module in parsed]
        if len({len(each) for each in functions}) > 1:
            raise DifferentProgramsError("lazyxla: the program has other functions for other sizes")
        checked = _sizes_to_check(bounds)
        for same in zip(*functions, strict=True):
            if world.ir.StringAttr(same[0].attributes["sym_name"]).value == "main":
                shapes = [[list(t.shape) for t in f.type.inputs] for f in same]
            Function(world, points, same, checked).generalize()
        stream = io.BytesIO()
        parsed[0].operation.verify()
        parsed[0].operation.write_bytecode(stream)
        bytecode = stream.getvalue()
        for sizes in checked:
            _check(world, points, bytecode, sizes, shapes)
        return bytecode


def _sizes_to_check(bounds: Bounds) -> list[tuple[int, ...]]:
    """Small, large and odd sizes of all variables."""
    wanted = [*zip(*bounds, strict=True), *((n,) * len(bounds) for n in (1, 2, 37, 1000, 4096))]
    found = [
        tuple(min(max(n, low), high, max(low, _LARGEST)) for n, (low, high) in zip(sizes, bounds))
        for sizes in wanted
    ]
    return sorted(set(found))


def _check(
    world: Mlir, points: Points, bytecode: bytes, sizes: Sequence[int], shapes: Sequence[Any]
) -> None:
    given = []
    for same in zip(*shapes, strict=True):
        found = [points.fit(dims) for dims in zip(*same, strict=True)]
        if None in found:
            raise DifferentProgramsError("lazyxla: an argument's dimension is no polynomial")
        given.append([dim.at(sizes) for dim in found if dim is not None])
    try:
        check_sizes(world, bytecode, sizes, given)
    except Exception as error:
        raise DifferentProgramsError(
            f"lazyxla: what was lowered for sizes {points.sizes} does not hold for {sizes}: {error}"
        ) from error


class Same(NamedTuple):
    """An operation of the first module, and what it is like at each point."""

    op: Any
    attributes: list[dict[str, Any]]
    shape: list[list[int]]
    """Of its first result."""


class Function:
    """A function, the same in each module; that of the first is changed."""

    def __init__(
        self, world: Mlir, points: Points, functions: Sequence[Any], checked: Sequence[Any]
    ) -> None:
        self.ir, self.hlo, self._func = world.ir, world.hlo, world.func
        self._points = points
        self._functions = functions
        self._checked = checked
        self._values: dict[Polynomial, Any] = {}
        self._added = 0
        self._i64 = self.ir.IntegerType.get_signless(64)
        self._scalar = self.ir.RankedTensorType.get([], self._i64)

    def generalize(self) -> None:
        first = self._functions[0]
        listed = [list(_operations(f, {})) for f in self._functions]
        for same in zip_longest(*listed, fillvalue=("nothing", None)):
            if any(uses != same[0][0] for uses, _ in same):
                op = next(op for _, op in same if op is not None)
                names = " or ".join(sorted({uses.split("(")[0] for uses, _ in same}))
                self.differs(op, f"it is {names}" if " or " in names else "its operands are others")
        for attribute in ("arg_attrs", "res_attrs"):
            if attribute in first.attributes:
                del first.attributes[attribute]
        block = first.regions[0].blocks[0]
        where = self.ir.Location.unknown()
        self._sizes = [block.add_argument(self._scalar, where) for _ in self._points.sizes[0]]
        with self.ir.InsertionPoint.at_block_begin(block):
            # What is computed from sizes is inserted before this one, which is erased in the end.
            self._anchor = self._constant(0).owner
        self._blocks([f.regions[0].blocks[0] for f in self._functions])
        self._anchor.erase()
        (*_, end) = block.operations
        inputs, results = [x.type for x in block.arguments], [x.type for x in end.operands]
        function_type = self.ir.FunctionType.get(inputs, results)
        first.attributes["function_type"] = self.ir.TypeAttr.get(function_type)

    def _blocks(self, blocks: Sequence[Any]) -> None:
        # Not strict: behind the arguments of the first function are the sizes.
        for values in zip(*(block.arguments for block in blocks), strict=False):
            self._retype(values)
        listed = [[op for op in block.operations if op != self._anchor] for block in blocks]
        for same in zip(*listed, strict=True):
            self._operation([x.operation for x in same])

    def _operation(self, same: Sequence[Any]) -> None:
        op = same[0]
        for i, region in enumerate(op.regions):
            for j in range(len(region.blocks)):
                self._blocks([x.regions[i].blocks[j] for x in same])
        attributes = [{name: x.attributes[name] for name in x.attributes} for x in same]
        names = set().union(*attributes)
        changed = {n for n in names if any(a.get(n) != attributes[0].get(n) for a in attributes)}
        shape = [self._shape(x.results[0].type) if x.results else [] for x in same]
        dynamic = [self._retype(values) for values in zip(*(x.results for x in same), strict=True)]
        name = op.name.removeprefix("stablehlo.")
        if name in ("func.call", "composite"):
            self._call(op)
            return
        rewrite = REWRITES.get(name)
        if changed - set(rewrite.attributes if rewrite is not None else ()):
            self.differs(op, f"its {', '.join(sorted(changed))} cannot depend on them")
        if any(dynamic) and name in STATIC:
            self.differs(op, "its shape cannot depend on them")
        if rewrite is not None and (changed or (any(dynamic) and rewrite.states_shape)):
            with self.ir.InsertionPoint(op), op.location:
                new = rewrite.make(self, Same(op, attributes, shape))
            op.results[0].replace_all_uses_with(new)
            op.erase()

    def _shape(self, type_: Any) -> list[int]:
        return list(type_.shape) if isinstance(type_, self.ir.RankedTensorType) else []

    def _retype(self, values: Sequence[Any]) -> bool:
        """Makes dynamic what depends on sizes in a value's type; returns whether anything does."""
        types = [value.type for value in values]
        if all(t == types[0] for t in types[1:]):
            return False
        ranked = [self.ir.RankedTensorType(t) for t in types]
        if len({(t.rank, str(t.element_type)) for t in ranked}) > 1:
            self.differs(values[0].owner, f"a value is {types[0]} or {types[1]}")
        unknown = self.ir.ShapedType.get_dynamic_size()
        shape = [
            sizes[0] if len(set(sizes)) == 1 else unknown
            for sizes in zip(*(t.shape for t in ranked), strict=True)
        ]
        values[0].set_type(self.ir.RankedTensorType.get(shape, ranked[0].element_type))
        return True

    def _call(self, op: Any) -> None:
        """Hands the sizes on. A composite becomes a call, since it could not be refined."""
        name = "callee" if op.name == "func.call" else "decomposition"
        with self.ir.InsertionPoint(op), op.location:
            new = self.ir.Operation.create(
                "func.call",
                results=[x.type for x in op.results],
                operands=[*op.operands, *self._sizes],
                attributes={"callee": op.attributes[name]},
            )
        for old, result in zip(op.results, new.results, strict=True):
            old.replace_all_uses_with(result)
        op.erase()

    def differs(self, op: Any, how: str) -> NoReturn:
        where = "" if "unknown" in str(op.location) else f" ({op.location})"
        raise DifferentProgramsError(
            "lazyxla: a program with symbolic dimensions must be the same for all their sizes; in "
            f"{op.name}{where}, {how}"
        )

    def add_function(self, name: str, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        """A private function without a body."""
        first = self._functions[0]
        self._added += 1
        prefix = self.ir.StringAttr(first.attributes["sym_name"]).value
        with self.ir.InsertionPoint(first), self.ir.Location.unknown():
            return self._func.FuncOp(
                f"{prefix}.{name}.{self._added}", (inputs, results), visibility="private"
            )

    def check_amounts(self, op: Any, listed: Sequence[Sequence[int]]) -> None:
        """Checks that amounts that are not negative for the sizes at hand are not for others
        either."""
        for values in zip(*listed, strict=True):
            found = self._points.fit(values)
            below = [s for s in self._checked if found is not None and found.at(s) < 0]
            if min(values) >= 0 and below:
                self.differs(op, f"{', '.join(map(str, values))} is negative for sizes {below[0]}")

    def numbers(self, op: Any, listed: Sequence[Sequence[int]]) -> Any:
        """A list of numbers for each point, as one tensor<n x i64>."""
        if not listed[0]:
            empty = self.ir.RankedTensorType.get([0], self._i64)
            return self.hlo.constant(self.ir.DenseElementsAttr.get([], type=empty))
        values = [self.number(op, each) for each in zip(*listed, strict=True)]
        return self.stack(values)

    def stack(self, values: Sequence[Any]) -> Any:
        """tensor<n x i64> of n of tensor<i64>."""
        one = self.ir.RankedTensorType.get([1], self._i64)
        return self.hlo.concatenate([self.hlo.reshape(one, x) for x in values], 0)

    def number(self, op: Any, values: Sequence[int]) -> Any:
        """A number for each point, as a tensor<i64>."""
        found = self._points.fit(values)
        if found is None:
            self.differs(op, f"a number is {', '.join(map(str, values))}: no polynomial of them")
        if found not in self._values:
            with self.ir.InsertionPoint(self._anchor), self.ir.Location.unknown():
                self._values[found] = self._computed(found)
        return self._values[found]

    def _computed(self, polynomial: Polynomial) -> Any:
        total = None
        for monomial, coefficient in polynomial.terms:
            factors = [] if coefficient == 1 and any(monomial) else [self._constant(coefficient)]
            for size, exponent in zip(self._sizes, monomial, strict=True):
                factors += [size] * exponent
            term, *others = factors
            for other in others:
                term = self.hlo.multiply(term, other)
            total = term if total is None else self.hlo.add(total, term)
        return self._constant(0) if total is None else total

    def _constant(self, number: int) -> Any:
        attribute = self.ir.IntegerAttr.get(self._i64, number)
        return self.hlo.constant(self.ir.DenseElementsAttr.get_splat(self._scalar, attribute))


def _operations(op: Any, numbers: dict[Any, int]) -> Iterator[tuple[str, Any]]:
    """The operations in an operation's regions: their names and operands, numbered in the order in
    which values are made. Without types and attributes."""
    for region in op.regions:
        for block in region.blocks:
            for x in block.arguments:
                numbers[x] = len(numbers)
            for each in block.operations:
                inner = each.operation
                yield f"{inner.name}({[numbers[x] for x in inner.operands]})", inner
                yield from _operations(inner, numbers)
                for x in inner.results:
                    numbers[x] = len(numbers)
