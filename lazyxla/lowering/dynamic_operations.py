"""Operations of StableHLO whose shapes, or numbers among their attributes, are operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lazyxla.lowering.dynamic_shapes import Function, Same


_LIMITS = ("start_indices", "limit_indices", "strides")
_PADDING = ("edge_padding_low", "edge_padding_high", "interior_padding")


def _constant(f: Function, same: Same) -> Any:
    dense = [f.ir.DenseElementsAttr(a["value"]) for a in same.attributes]
    element = f.ir.RankedTensorType(same.op.results[0].type).element_type
    scalar = f.ir.RankedTensorType.get([], element)
    if not all(x.is_splat for x in dense):
        f.differs(same.op, "several numbers cannot depend on them")
    splats = [x.get_splat_value() for x in dense]
    if all(x == splats[0] for x in splats):
        value = f.hlo.constant(f.ir.DenseElementsAttr.get_splat(scalar, splats[0]))
    else:
        value = _varying(f, same.op, scalar, [x.value for x in splats])
    if not same.shape[0]:
        return value
    type_, shape = same.op.results[0].type, f.numbers(same.op, same.shape)
    return f.hlo.dynamic_broadcast_in_dim(type_, value, shape, [])


def _varying(f: Function, op: Any, type_: Any, values: Sequence[Any]) -> Any:
    """A number that depends on sizes: a whole one, or one divided by such."""
    if all(float(x).is_integer() for x in values):
        return f.hlo.convert(type_, f.number(op, [int(x) for x in values]))
    inverses = [round(1 / x) if x else 0 for x in values]
    # Tolerance: the rounding of bfloat16.
    if any(abs(n * x - 1) > 2**-8 for n, x in zip(inverses, values, strict=True)):
        f.differs(op, f"a number is {', '.join(map(str, values))}")
    whole = f.hlo.convert(type_, f.number(op, inverses))
    one = f.ir.FloatAttr.get(f.ir.RankedTensorType(type_).element_type, 1.0)
    return f.hlo.divide(f.hlo.constant(f.ir.DenseElementsAttr.get_splat(type_, one)), whole)


def _broadcast_in_dim(f: Function, same: Same) -> Any:
    op, dims = same.op, same.attributes[0]["broadcast_dimensions"]
    shape = f.numbers(op, same.shape)
    return f.hlo.dynamic_broadcast_in_dim(op.results[0].type, op.operands[0], shape, dims)


def _iota(f: Function, same: Same) -> Any:
    op, dim = same.op, same.attributes[0]["iota_dimension"]
    return f.hlo.dynamic_iota(op.results[0].type, f.numbers(op, same.shape), dim)


def _reshape(f: Function, same: Same) -> Any:
    op = same.op
    return f.hlo.dynamic_reshape(op.results[0].type, op.operands[0], f.numbers(op, same.shape))


def _slice(f: Function, same: Same) -> Any:
    type_ = same.op.results[0].type
    return f.hlo.real_dynamic_slice(type_, same.op.operands[0], *_lists(f, same, _LIMITS))


def _pad(f: Function, same: Same) -> Any:
    for name in _PADDING:
        f.check_amounts(same.op, [list(f.ir.DenseI64ArrayAttr(a[name])) for a in same.attributes])
    return f.hlo.dynamic_pad(same.op.results[0].type, *same.op.operands, *_lists(f, same, _PADDING))


def _gather(f: Function, same: Same) -> Any:
    (sizes,) = _lists(f, same, ("slice_sizes",))
    return f.hlo.dynamic_gather(
        *same.op.operands,
        sizes,
        same.attributes[0]["dimension_numbers"],
        indices_are_sorted=same.attributes[0].get("indices_are_sorted"),
        results=[same.op.results[0].type],
    )


def _dynamic_slice(f: Function, same: Same) -> Any:
    """The start of a slice whose end would be outside is moved, as that of a static one."""
    operand, *starts = same.op.operands
    lists = [list(f.ir.DenseI64ArrayAttr(a["slice_sizes"])) for a in same.attributes]
    i64 = f.number(same.op, [0] * len(lists)).type
    zero = f.number(same.op, [0] * len(lists))
    first, last = [], []
    for i, (start, each) in enumerate(zip(starts, zip(*lists, strict=True), strict=True)):
        size = f.number(same.op, each)
        whole = f.hlo.convert(i64, f.hlo.get_dimension_size(operand, i))
        clamped = f.hlo.clamp(zero, f.hlo.convert(i64, start), f.hlo.subtract(whole, size))
        first.append(clamped)
        last.append(f.hlo.add(clamped, size))
    ones = f.numbers(same.op, [[1] * len(starts)] * len(lists))
    type_ = same.op.results[0].type
    return f.hlo.real_dynamic_slice(type_, operand, f.stack(first), f.stack(last), ones)


def _reduce_window(f: Function, same: Same) -> Any:
    """A call of what the refinement takes for it, with its body as a function."""
    op, ir = same.op, f.ir
    if len(op.results) > 1:
        f.differs(op, "several results cannot depend on them")
    block = op.regions[0].blocks[0]
    types = [x.type for x in block.arguments]
    body = f.add_function("reduce_window", types, types[:1])
    block.append_to(body.regions[0])
    rank = len(same.shape[0])
    ones = [[1] * rank] * len(same.attributes)
    sizes = []
    for name in ("window_dimensions", "window_strides", "base_dilations", "window_dilations"):
        given = name in same.attributes[0]
        sizes.append(_lists(f, same, (name,))[0] if given else f.numbers(op, ones))
    # [rank, 2]: below and above; a whole attribute may be one number
    if "padding" in same.attributes[0]:
        dense = [ir.DenseIntElementsAttr(a["padding"]) for a in same.attributes]
        padding = [[x[i] for i in range(2 * rank)] for x in dense]
    else:
        padding = [[0] * 2 * rank] * len(same.attributes)
    pairs = ir.RankedTensorType.get([rank, 2], ir.IntegerType.get_signless(64))
    call = ir.Operation.create(
        "stablehlo.custom_call",
        results=[op.results[0].type],
        operands=[*op.operands, *sizes, f.hlo.reshape(pairs, f.numbers(op, padding))],
        attributes={
            "call_target_name": ir.StringAttr.get("stablehlo.dynamic_reduce_window"),
            "called_computations": ir.ArrayAttr.get([ir.FlatSymbolRefAttr.get(body.name.value)]),
        },
    )
    return call.results[0]


def _lists(f: Function, same: Same, names: Sequence[str]) -> list[Any]:
    """Lists of numbers among an operation's attributes, as tensors."""
    found = []
    for name in names:
        listed = [list(f.ir.DenseI64ArrayAttr(a[name])) for a in same.attributes]
        found.append(f.numbers(same.op, listed))
    return found


class Rewrite(NamedTuple):
    """How an operation is made one for any sizes.

    Attributes:
        make: what makes its result.
        attributes: those that become operands.
        states_shape: whether it has to be made anew where only its shape depends on sizes.
    """

    make: Callable[[Function, Same], Any]
    attributes: tuple[str, ...] = ()
    states_shape: bool = True


REWRITES = {
    "broadcast_in_dim": Rewrite(_broadcast_in_dim),
    "constant": Rewrite(_constant, ("value",)),
    "dynamic_slice": Rewrite(_dynamic_slice, ("slice_sizes",), False),
    "gather": Rewrite(_gather, ("slice_sizes",), False),
    "iota": Rewrite(_iota),
    "pad": Rewrite(_pad, _PADDING, False),
    "reduce_window": Rewrite(_reduce_window, ("padding", "window_dimensions"), False),
    "reshape": Rewrite(_reshape),
    "slice": Rewrite(_slice, _LIMITS, False),
}

STATIC = ("custom_call", "rng_bit_generator")
"""Operations without a form for shapes that depend on sizes."""
