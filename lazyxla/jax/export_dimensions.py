"""The symbolic dimensions of what torch.export exports, as JAX's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_NO_BOUND = 1 << 40


class Dimensions:
    """The dimensions of an exported program's arguments.

    Attributes:
        bounds: of each, by its name, the least and the largest size, or None.
    """

    def __init__(self, program: torch.export.ExportedProgram, dynamic_shapes: Any) -> None:
        """`dynamic_shapes`: what it was exported with, which has the names of dimensions."""
        self._program = program
        self._shapes = _shapes(program)
        names = _names(program, dynamic_shapes, self._shapes)
        self._names = names
        self.bounds: dict[str, dict[str, int | None]] = {}
        for symbol, given in program.range_constraints.items():
            if str(symbol) in names:
                least, largest = max(int(given.lower), 1), given.upper
                known = bool(largest < _NO_BOUND)  # infinity is no number here
                bounds = {"min": least, "max": int(largest) if known else None}
                self.bounds[names[str(symbol)]] = bounds

    def types(self, tree: Any, arrays: list[Any]) -> list[Any]:
        """Types of JAX's for the leaves of a tree (args, kwargs) of arrays."""
        import jax

        constraints = []
        for name, bounds in self.bounds.items():
            constraints.append(f"{name} >= {bounds['min']}")
            if bounds["max"] is not None:
                constraints.append(f"{name} <= {bounds['max']}")
        scope = jax.export.SymbolicScope(constraints)
        spec = self._program.call_spec.in_spec
        # JAX orders what is in a dict by name, PyTorch as it was put in.
        args, kwargs = pytree.tree_unflatten([_Leaf(s) for s in self._shapes], spec)
        leaves = tree.flatten_up_to((args, kwargs))
        found = []
        for array, leaf in zip(arrays, leaves, strict=True):
            if array is None or all(isinstance(d, int) for d in leaf.shape):
                found.append(array)
                continue
            dims = ", ".join(self._renamed(d) for d in leaf.shape)
            shape = jax.export.symbolic_shape(f"({dims},)", scope=scope)
            found.append(jax.ShapeDtypeStruct(shape, array.dtype))
        return found

    def _renamed(self, dim: Any) -> str:
        return re.sub(r"\bs\d+\b", lambda found: self._names[found[0]], str(dim))


def check_sizes(manifest: dict[str, Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Checks the shapes of a program's arguments, in order, by its manifest.

    Raises:
        ValueError: a symbolic dimension has two sizes, or one out of its bounds.
    """
    expected = [each["shape"] for each in manifest["inputs"] if each["kind"] == "argument"]
    found: dict[str, int] = {}
    for dims, shape in zip(expected, shapes, strict=False):
        for dim, size in zip(dims, shape, strict=False):
            if not isinstance(dim, str):
                continue
            if found.setdefault(dim, size) != size:
                raise ValueError(f"the dimension {dim} has two sizes: {found[dim]} and {size}")
            bounds = manifest["dimensions"].get(dim, {"min": 0, "max": None})
            least, largest = bounds["min"], bounds["max"]
            if size < least or (largest is not None and size > largest):
                allowed = f"{least} to {largest}" if largest is not None else f"{least} or more"
                raise ValueError(f"the dimension {dim} may be {allowed}, got {size}")


class _Leaf:
    """A shape, which is no pytree; that of what is no tensor has no dimensions."""

    def __init__(self, shape: tuple[Any, ...] | None) -> None:
        self.shape = shape or ()


def _shapes(program: torch.export.ExportedProgram) -> list[tuple[Any, ...] | None]:
    """The dimensions of each flat argument, numbers or symbols; None for what is not a tensor."""
    values = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    found: list[tuple[Any, ...] | None] = []
    for name in program.graph_signature.user_inputs:
        value = values.get(name) if isinstance(name, str) else None
        if isinstance(value, torch.Tensor):
            found.append(tuple(_symbol(d) for d in value.shape))
        else:
            found.append(None)
    return found


def _symbol(dim: Any) -> Any:
    return dim if isinstance(dim, int) else dim.node.expr


def _free(dim: Any) -> set[Any]:
    return set() if isinstance(dim, int) else dim.free_symbols


def _names(
    program: torch.export.ExportedProgram, dynamic_shapes: Any, shapes: list[Any]
) -> dict[str, str]:
    """A name for each symbol: that of the user's ``Dim``, or the symbol's own."""
    symbols = {str(s) for shape in shapes if shape for d in shape for s in _free(d)}
    names = {symbol: symbol for symbol in symbols}
    args, kwargs = program.example_inputs or ((), {})
    dims = _dims_by_tensor(program, args, kwargs, dynamic_shapes)
    leaves = pytree.tree_leaves((args, kwargs))
    for shape, leaf in zip(shapes, leaves, strict=True):
        for i, dim in enumerate(shape or ()):
            given = dims.get((id(leaf), i))
            # The Dim from which 2 * batch is derived is its root.
            name: Any = getattr(getattr(given, "root", given), "__name__", None)
            for symbol in _free(dim) if isinstance(name, str) else ():
                names[str(symbol)] = name
    return names


def _dims_by_tensor(
    program: torch.export.ExportedProgram, args: Any, kwargs: Any, dynamic_shapes: Any
) -> dict[tuple[int, int], Any]:
    """The entry of `dynamic_shapes` for each dimension of each tensor, by the tensor's id."""
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        dynamic_shapes = dynamic_shapes.dynamic_shapes(program.module(), args, kwargs)
    found: dict[tuple[int, int], Any] = {}

    def visit(value: Any, spec: Any) -> None:
        if spec is None:
            return
        if isinstance(value, torch.Tensor):
            dims = spec.items() if isinstance(spec, Mapping) else enumerate(spec)
            found.update({(id(value), i): dim for i, dim in dims})
        elif isinstance(value, Mapping):
            for name, part in value.items():
                visit(part, spec.get(name))
        else:
            parts = value if isinstance(value, (tuple, list)) else pytree.tree_leaves(value)
            for part, inner in zip(parts, spec, strict=False):
                visit(part, inner)

    bound = inspect.signature(program.module().forward).bind(*args, **kwargs).arguments
    visit(bound if isinstance(dynamic_shapes, Mapping) else tuple(bound.values()), dynamic_shapes)
    return found
