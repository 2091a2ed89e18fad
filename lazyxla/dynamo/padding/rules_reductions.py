"""Rules of operators that reduce, accumulate, normalise or order along dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import Arguments, Call, Results, rule
from lazyxla.dynamo.padding.structure import Factor, NotPaddableError, Structure

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

aten = torch.ops.aten


def least(dtype: torch.dtype) -> float:
    """A value that is below no other of a dtype."""
    if dtype.is_complex:
        raise NotPaddableError("orders complex numbers")
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def greatest(dtype: torch.dtype) -> float:
    if dtype.is_complex:
        raise NotPaddableError("orders complex numbers")
    if dtype.is_floating_point:
        return math.inf
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def last_in_order(dtype: torch.dtype) -> float:
    """The value that is sorted last: PyTorch sorts nan after infinity."""
    return math.nan if dtype.is_floating_point else greatest(dtype)


def _count(given: Structure, dims: tuple[int, ...]) -> Factor:
    """How many true elements a reduction takes."""
    return structure.product(factor for d in dims for factor in given[d])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _real(dtype: torch.dtype) -> torch.dtype:
    return torch.empty((), dtype=dtype, device="meta").real.dtype if dtype.is_complex else dtype


def _dims_of(call: Call) -> tuple[Structure, tuple[int, ...], Structure]:
    """A reduction's operand, the dimensions it takes, and its result's structure."""
    given = call.of("self")
    dims = call.dims("dim", len(given))
    return given, dims, structure.reduced(given, dims, bool(call.get("keepdim", False)))


def reduction(
    neutral: float | Callable[[torch.dtype], float], *, positions: bool = False
) -> Callable[[Call], Results]:
    """A reduction that a neutral element does not change. `positions`: it returns some."""

    def apply(call: Call) -> Results:
        given, dims, result = _dims_of(call)
        padded = call.padded_dims(given, dims)
        if padded:
            if positions:
                _check_positions(call, given, dims)
            dtype = call.dtype("self")
            call.fill("self", neutral(dtype) if callable(neutral) else neutral, dims)
        several = isinstance(call.result, (list, tuple))
        return [result] * len(call.result) if several else result

    return apply


def _check_positions(call: Call, given: Structure, dims: tuple[int, ...]) -> None:
    """Positions within one dimension, or in all of a tensor that only its first one pads."""
    for dim in dims:
        call.require_whole(given[dim])
    if len(dims) > 1 and call.padded_dims(given, dims[1:]):
        raise NotPaddableError("counts positions across padding")


rule(
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.nansum.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
)(reduction(0))
rule(aten.prod.default, aten.prod.dim_int)(reduction(1))
rule(aten.any.default, aten.any.dim, aten.any.dims)(reduction(0))
rule(aten.all.default, aten.all.dim, aten.all.dims)(reduction(1))
rule(aten.amax.default, aten.max.default)(reduction(least))
rule(aten.amin.default, aten.min.default)(reduction(greatest))
rule(aten.max.dim, aten.argmax.default)(reduction(least, positions=True))
rule(aten.min.dim, aten.argmin.default)(reduction(greatest, positions=True))
rule(aten.logsumexp.default)(reduction(least))


@rule(
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
)
def _norm(call: Call) -> Results:
    order = call.get("ord", call.get("p", 2))
    if not isinstance(order, (int, float)) or order < 0:
        raise NotPaddableError("is a norm of negative order")
    return reduction(0)(call)


@rule(aten.mean.default, aten.mean.dim)
def _mean(call: Call) -> Structure:
    given, dims, result = _dims_of(call)
    if call.padded_dims(given, dims):
        call.fill("self", 0, dims)
        dtype, keepdim = call.result.dtype, bool(call.get("keepdim", False))
        count = _count(given, dims)

        def rewrite(w: Writer, args: Arguments) -> Any:
            total = _sum(w, args["self"], dims, keepdim, _wide(dtype))
            divisor = w.number(count, _real(_wide(dtype)))
            return w.cast(w.emit(aten.div.Tensor, total, divisor), dtype)

        call.rewrite(rewrite)
    return result


def _sum(
    w: Writer, x: fx.Node, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype
) -> fx.Node:
    result: fx.Node = w.emit(aten.sum.dim_IntList, x, list(dims), keepdim, dtype=dtype)
    return result


def moments(
    w: Writer, x: fx.Node, given: Structure, dims: tuple[int, ...]
) -> tuple[fx.Node, fx.Node]:
    """The mean of true elements, and the sum of squared distances from it; dimensions are kept."""
    x = w.cast(x, _wide(x.meta["val"].dtype))
    dtype = x.meta["val"].dtype
    total = _sum(w, w.fill(x, given, 0, dims), dims, True, dtype)
    mean = w.emit(aten.div.Tensor, total, w.number(_count(given, dims), dtype))
    distance = w.fill(w.emit(aten.sub.Tensor, x, mean), given, 0, dims)
    squares = w.emit(aten.mul.Tensor, distance, distance)
    return mean, _sum(w, squares, dims, True, dtype)


@rule(
    aten.var.correction,
    aten.std.correction,
    aten.var_mean.correction,
    aten.std_mean.correction,
)
def _var(call: Call) -> Results:
    given, dims, result = _dims_of(call)
    target: Any = call.node.target
    name = target._schema.name.removeprefix("aten::")
    if call.padded_dims(given, dims):
        if call.dtype("self").is_complex:
            raise NotPaddableError("takes a variance of complex numbers")
        correction = call.get("correction", 1)
        count = structure.expression(sympy.Max(0, _count(given, dims) - correction))
        keepdim, dtype = bool(call.get("keepdim", False)), call.dtype("self")

        def rewrite(w: Writer, args: Arguments) -> Any:
            mean, squares = moments(w, args["self"], given, dims)
            divisor = w.number(count, squares.meta["val"].dtype)
            spread = w.emit(aten.div.Tensor, squares, divisor)
            if name.startswith("std"):
                spread = w.emit(aten.sqrt.default, spread)
            results = [spread, mean] if name.endswith("mean") else [spread]
            if not keepdim:
                results = [w.emit(aten.squeeze.dims, r, list(dims)) for r in results]
            results = [w.cast(r, dtype) for r in results]
            return results if name.endswith("mean") else results[0]

        call.rewrite(rewrite)
    return [result, result] if name.endswith("mean") else result


# --- Along a dimension ---------------------------------------------------------------------------


@rule(
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
)
def _cumulate(call: Call) -> Results:
    """All elements before a true one are true, unless the dimension was flattened."""
    given = call.of("self")
    if given:
        call.require_whole(given[call["dim"] % len(given)])
    return [given] * 2 if isinstance(call.result, (list, tuple)) else given


@rule(
    aten._softmax.default,
    aten._log_softmax.default,
    aten._safe_softmax.default,
)
def _softmax(call: Call) -> Structure:
    given = call.of("self")
    if given:
        call.fill("self", -math.inf, [call["dim"] % len(given)])
    return given


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def _softmax_backward(call: Call) -> Structure:
    given = call.of("output")
    call.require_same(given, call.of("grad_output"))
    if given:
        for name in ("grad_output", "output"):
            call.fill(name, 0, [call["dim"] % len(given)])
    return given


@rule(aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)
def _sort(call: Call) -> Results:
    given = call.of("self")
    dim = call.get("dim", -1) % max(len(given), 1)
    if call.padded_dims(given, [dim] if given else []):
        call.require_whole(given[dim])
        if len(given[dim]) > 1:
            raise NotPaddableError("orders a flattened dimension")
        dtype = call.dtype("self")
        call.fill("self", (least if call["descending"] else last_in_order)(dtype), [dim])
    return [given] * 2 if isinstance(call.result, (list, tuple)) else given


@rule(aten.topk.default)
def _topk(call: Call) -> Results:
    given = list(call.of("self"))
    dim = call.get("dim", -1) % max(len(given), 1)
    if call.padded_dims(tuple(given), [dim]):
        call.require_whole(given[dim])
        dtype = call.dtype("self")
        call.fill("self", (least if call["largest"] else last_in_order)(dtype), [dim])
    if given:
        given[dim] = structure.joined([call["k"]])
    return [tuple(given)] * 2
