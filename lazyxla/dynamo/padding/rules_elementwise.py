"""Rules of element-wise operators, and of factories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import Arguments, Call, constant, is_tensor, rule
from lazyxla.dynamo.padding.structure import NotPaddableError, Structure

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)

# The forms of operators that take a tensor where these take a number.
_WITH_TENSOR = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.masked_fill.Scalar: aten.masked_fill.Tensor,
    aten.where.ScalarOther: aten.where.self,
    aten.where.ScalarSelf: aten.where.self,
}


def pointwise(call: Call) -> Structure:
    """Element-wise operators, with broadcasting: padding keeps its positions."""
    numbers = [n for n, v in call.arguments.items() if not is_tensor(v) and call.has_symbol(v)]
    if numbers:
        _take_numbers(call, numbers)
    return structure.broadcast([call.of(name) for name in call.tensors()], call.padded)


def _take_numbers(call: Call, names: list[str]) -> None:
    """Makes numbers that depend on true sizes arguments of the graph."""
    target: Any = call.node.target
    with_tensor = _WITH_TENSOR.get(target, target)
    types = {a.name: str(a.type) for a in with_tensor._schema.arguments}
    if any(types.get(name) != "Tensor" for name in names):
        raise NotPaddableError("takes a number that depends on a size that varies")
    numbers = {name: call[name] for name in names}
    result = call.result.dtype
    floating = [call.dtype(n) for n in call.tensors() if call.dtype(n).is_floating_point]
    integral = all(getattr(v, "is_integer", False) for v in numbers.values())

    def rewrite(w: Writer, args: Arguments) -> Any:
        dtype = torch.int64
        if result.is_floating_point or floating or not integral:
            kind = result if result.is_floating_point else (floating or [torch.float64])[0]
            dtype = torch.float32 if kind in _HALVES else kind
        operands = dict(args)
        for name, value in numbers.items():
            operands[name] = w.number(value, dtype)
        for name, value in operands.items():
            if isinstance(value, fx.Node) and value.meta["val"].dtype in _HALVES:
                operands[name] = w.cast(value, torch.float32)  # the number might not fit
        schema = with_tensor._schema.arguments
        listed = [operands[a.name] for a in schema if not a.kwarg_only]
        named = {a.name: operands[a.name] for a in schema if a.kwarg_only}
        return w.cast(w.emit(with_tensor, *listed, **named), result)

    call.rewrite(rewrite)


rule(
    aten.clone.default,
    aten._to_copy.default,
    aten.floor_divide.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    aten.native_dropout.default,
    aten.native_dropout_backward.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.where.self,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    # PyTorch does not tag all element-wise operators as such.
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.elu_backward.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.isclose.default,
    aten.leaky_relu_backward.default,
    aten.mish_backward.default,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.fill.Scalar,
    numbers=True,
)(
    lambda call: (
        [pointwise(call)] * len(call.result)
        if isinstance(call.result, (list, tuple))
        else pointwise(call)
    )
)


@rule(aten.copy_.default)
def _copy(call: Call) -> Structure:
    """A graph's writes into its arguments, at its end."""
    if call.is_padded(*call.of("self"), *call.of("src")):
        raise NotPaddableError("writes into a tensor whose size varies")
    return call.of("self")


def _made(call: Call) -> Structure:
    """A tensor that is the same everywhere, or whose elements do not matter."""
    return tuple(
        structure.uniform(size) if call.has_symbol(structure.expression(size)) else dim
        for size, dim in zip(call.result.shape, constant(call.result), strict=True)
    )


rule(
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.rand.default,
    aten.randn.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    sizes=("size",),
)(_made)


@rule(aten.full.default, aten.new_full.default, numbers=True)
def _full(call: Call) -> Structure:
    value = call["fill_value"]
    if call.has_symbol(value):
        dtype, size = call.result.dtype, call["size"]
        call.rewrite(lambda w, _: w.emit(aten.expand.default, w.number(value, dtype), w.size(size)))
    return _made(call)


@rule(aten.scalar_tensor.default, numbers=True)
def _scalar_tensor(call: Call) -> Structure:
    """A number of the program, on the CPU too: is_number of ../partition.py."""
    value, dtype, device = call["s"], call.result.dtype, call.result.device
    if call.has_symbol(value):
        call.rewrite(lambda w, _: w.number(value, dtype, device))
    return ()


@rule(
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    sizes=("end",),
)
def _arange(call: Call) -> Structure:
    (size,) = call.result.shape
    expr = structure.expression(size)
    if call.get("step", 1) != 1 or isinstance(call["end"], float):
        raise NotPaddableError("counts in steps")
    if expr != structure.expression(call["end"] - call.get("start", 0)):
        raise NotPaddableError("counts from a position that varies")
    return (structure.of_size(size),)


@rule(aten.tril.default, aten.triu.default)
def _triangle(call: Call) -> Structure:
    for dim in call.of("self")[-2:]:
        call.require_whole(dim)
        if call.is_padded(dim) and len(dim) > 1:
            raise NotPaddableError("counts positions across padding")
    return call.of("self")


@rule(aten.expand.default, sizes=("size",))
def _expand(call: Call) -> Structure:
    given = call.of("self")
    shape = call.result.shape
    given = ((),) * (len(shape) - len(given)) + given
    made = _made(call)
    return tuple(ours or new for ours, new in zip(given, made, strict=True))


@rule(aten.repeat.default, sizes=("repeats",))
def _repeat(call: Call) -> Structure:
    given = call.of("self")
    repeats = call["repeats"]
    given = ((),) * (len(repeats) - len(given)) + given
    return tuple(
        structure.joined([structure.expression(count), *dim])
        for count, dim in zip(repeats, given, strict=True)
    )
