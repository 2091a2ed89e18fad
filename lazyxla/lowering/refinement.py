"""Modules for given sizes of those with symbolic dimensions, by JAX's refinement."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from lazyxla.lowering.mlir import Mlir


def is_symbolic(module: Any) -> bool:
    """Whether a module calls functions of symbolic dimensions, such as exported programs."""
    return any(
        not getattr(type_, "has_static_shape", True)
        for op in module.body.operations
        if op.operation.name == "func.func"
        for type_ in op.type.inputs
    )


def refine(bytecode: bytes) -> bytes:
    """A module whose `main` has arguments of known shapes, with all shapes known."""
    from jaxlib import _jax

    refined: bytes = _jax.mlir.refine_polymorphic_shapes(
        bytecode, enable_shape_assertions=True, validate_static_shapes=True
    )
    return refined


def check_sizes(
    world: Mlir, bytecode: bytes, sizes: Sequence[int], shapes: Sequence[Sequence[int]]
) -> None:
    """Checks that a module of `dynamic_shapes` has valid shapes for some sizes.

    Args:
        sizes: which its `main` takes last.
        shapes: of its other arguments then.

    Raises:
        Exception: they are not, by MLIR's verifier.
    """
    ir, hlo, func = world.ir, world.hlo, world.func
    module = ir.Module.parse(bytecode)
    (main,) = (
        f for f in module.body.operations if ir.StringAttr(f.attributes["sym_name"]).value == "main"
    )
    ir.SymbolTable.replace_all_symbol_uses("main", "for_any_sizes", module.operation)
    ir.SymbolTable.set_symbol_name(main, "for_any_sizes")
    ir.SymbolTable.set_visibility(main, "private")
    types = [ir.RankedTensorType(x.type) for x in main.arguments]
    static = [
        ir.RankedTensorType.get(shape, t.element_type)
        for shape, t in zip(shapes, types, strict=False)
    ]
    with ir.InsertionPoint(module.body):
        wrapper = func.FuncOp("main", (static, main.type.results))
        block = wrapper.add_entry_block()
    with ir.InsertionPoint(block):
        given = [hlo.convert(t, x) for t, x in zip(types, block.arguments, strict=False)]
        i64 = ir.IntegerType.get_signless(64)
        for type_, size in zip(types[len(given) :], sizes, strict=True):
            number = ir.DenseElementsAttr.get_splat(type_, ir.IntegerAttr.get(i64, size))
            given.append(hlo.constant(number))
        func.ReturnOp(func.CallOp(main, given).results)
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    refine(stream.getvalue())
