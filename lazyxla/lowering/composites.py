"""Composites: operators that a module keeps by name, with what they are made of behind it.

A compiler that has a kernel for one finds it by PyTorch's name; any other inlines what is behind.

    stablehlo.composite "aten.gelu" %x {composite_attributes = {approximate = "tanh"},
                                        decomposition = @aten.gelu.3}
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_NAMES = {
    "aten::_fused_rms_norm": "aten.rms_norm",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten.scaled_dot_product_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable": "aten.scaled_dot_product_attention",
    "aten::_softmax": "aten.softmax",
    "aten::gelu": "aten.gelu",
    "aten::native_group_norm": "aten.group_norm",
    "aten::native_layer_norm": "aten.layer_norm",
    "aten::silu": "aten.silu",
}


def is_composite(b: Builder, name: str) -> bool:
    """Whether a call of an operator is to be one."""
    return b.target.composites and b.depth == 0 and name in _NAMES


def composite(
    b: Builder,
    name: str,
    arguments: dict[str, Any],
) -> list[Any]:
    """The results of a call as a composite. `arguments` are all of the operator's, by name."""
    operands = [x for x in arguments.values() if isinstance(x, Value)]

    def results(values: list[Any]) -> list[Any]:
        given = iter(values)
        return b.apply(
            name, tuple(next(given) if isinstance(x, Value) else x for x in arguments.values())
        )

    symbol = f"{_NAMES[name]}.{len(b.callees)}"
    types = [x.type for x in operands]
    made = b.callees[symbol] = b.function(symbol, types, results)
    ir = b.mlir.ir
    call = b.hlo.CompositeOp(
        list(made.type.results),
        operands,
        name=_NAMES[name],
        decomposition=symbol,
        composite_attributes=ir.DictAttr.get(
            {
                argument: attribute
                for argument, x in arguments.items()
                if (attribute := _attribute(b, x)) is not None
            }
        ),
    )
    return b.wrap(call.results)


def _attribute(b: Builder, x: Any) -> Any:
    """An argument that is no operand; None for one that is, or that was not given."""
    ir = b.mlir.ir
    if isinstance(x, Scalar):
        x = x.number
    if isinstance(x, bool):
        return ir.BoolAttr.get(x)
    if isinstance(x, int):
        return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), x)
    if isinstance(x, float):
        return ir.FloatAttr.get(ir.F64Type.get(), x)
    if isinstance(x, str):
        return ir.StringAttr.get(x)
    if isinstance(x, (list, tuple)) and all(type(n) is int for n in x):
        return ir.DenseI64ArrayAttr.get(list(x))
    return None
