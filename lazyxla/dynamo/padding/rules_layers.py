"""Rules of layers: normalisation, convolution, pooling, embedding, and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lazyxla.dynamo.padding import structure
from lazyxla.dynamo.padding.rules import Arguments, Call, Results, constant, rule
from lazyxla.dynamo.padding.rules_reductions import moments
from lazyxla.dynamo.padding.structure import NotPaddableError, Structure

if TYPE_CHECKING:
    from lazyxla.dynamo.padding.rewriting import Writer

aten = torch.ops.aten


def _masked_results(call: Call, results: list[Structure | None]) -> Results:
    """Results, less those that an output mask leaves out."""
    return [r if v is not None else None for r, v in zip(results, call.result, strict=True)]


# --- Normalisation over dimensions that are not padded -------------------------------------------


def _rows(call: Call, name: str) -> tuple[Structure, Structure]:
    """An operand, and the structure of its statistics."""
    given = call.of(name)
    inner = len(call["normalized_shape"])
    outer = given[: len(given) - inner]
    if call.is_padded(*given[len(outer) :]):
        raise NotPaddableError("normalises over a dimension whose size varies")
    return given, (*outer, *[()] * inner)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(call: Call) -> Results:
    given, rows = _rows(call, "input")
    call.require_constant("weight", "bias")
    return [given, *[rows] * (len(call.result) - 1)]


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def _layer_norm_backward(call: Call) -> Results:
    given, _ = _rows(call, "input")
    call.require_constant("weight", "bias")
    for name in ("grad_out", "input", "mean", "rstd"):
        call.fill(name, 0)
    rest = [None if v is None else constant(v) for v in call.result[1:]]
    return _masked_results(call, [given, *rest])


@rule(aten.native_group_norm.default, sizes=("N",))
def _group_norm(call: Call) -> Results:
    given = _only_batches(call, "input")
    call.require_constant("weight", "bias")
    rows = (given[0], structure.joined([call["group"]]))
    return [given, rows, rows]


@rule(aten.native_group_norm_backward.default, sizes=("N",))
def _group_norm_backward(call: Call) -> Results:
    given = _only_batches(call, "input")
    call.require_constant("weight")
    for name in ("grad_out", "input", "mean", "rstd"):
        call.fill(name, 0)
    rest = [None if v is None else constant(v) for v in call.result[1:]]
    return _masked_results(call, [given, *rest])


# --- Batch normalisation: over all dimensions but the second -------------------------------------


def _batch_norm_input(call: Call) -> tuple[Structure, tuple[int, ...]]:
    given = call.of("input")
    if call.is_padded(given[1]):
        raise NotPaddableError("has channels whose number varies")
    names = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd")
    call.require_constant(*names)
    return given, tuple(d for d in range(len(given)) if d != 1)


@rule(aten._native_batch_norm_legit_no_training.default)
def _batch_norm_eval(call: Call) -> Results:
    given, _ = _batch_norm_input(call)
    return [given, *[constant(v) for v in call.result[1:]]]


@rule(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm.default,
)
def _batch_norm(call: Call) -> Results:
    given, dims = _batch_norm_input(call)
    results: list[Structure | None] = [given, *[constant(v) for v in call.result[1:]]]
    target: Any = call.node.target
    if not call["training"]:
        return results
    if target == aten.native_batch_norm.default:
        raise NotPaddableError("writes statistics without saying so")
    count = structure.product(f for d in dims for f in given[d])
    eps, momentum = call["eps"], call["momentum"]
    functional = target == aten._native_batch_norm_legit_functional.default

    def rewrite(w: Writer, args: Arguments) -> Any:
        x = args["input"]
        mean, squares = moments(w, x, given, dims)
        wide = mean.meta["val"].dtype
        variance = w.emit(aten.div.Tensor, squares, w.number(count, wide))
        rstd = w.emit(aten.rsqrt.default, w.emit(aten.add.Scalar, variance, eps))
        y = w.emit(aten.sub.Tensor, w.cast(x, wide), mean)
        y = w.emit(aten.mul.Tensor, y, rstd)
        if args["weight"] is not None:
            y = w.emit(aten.mul.Tensor, y, _per_channel(w, args["weight"], given))
        if args["bias"] is not None:
            y = w.emit(aten.add.Tensor, y, _per_channel(w, args["bias"], given))
        flat = [w.emit(aten.view.default, v, [-1]) for v in (mean, rstd, squares)]
        outputs = [w.cast(y, x.meta["val"].dtype), flat[0], flat[1]]
        if functional:
            free = w.number(structure.expression(count - 1), wide)
            unbiased = w.emit(aten.div.Tensor, flat[2], free)
            outputs += [
                w.cast(_blend(w, args[name], new, momentum), args[name].meta["val"].dtype)
                for name, new in (("running_mean", flat[0]), ("running_var", unbiased))
            ]
        return outputs

    call.rewrite(rewrite)
    return results


def _per_channel(w: Writer, x: fx.Node, given: Structure) -> Any:
    return w.emit(aten.view.default, x, [1, -1, *[1] * (len(given) - 2)])


def _blend(w: Writer, old: fx.Node, new: fx.Node, momentum: float) -> Any:
    kept = w.emit(aten.mul.Scalar, old, 1 - momentum)
    return w.emit(aten.add.Tensor, kept, w.emit(aten.mul.Scalar, new, momentum))


@rule(aten.native_batch_norm_backward.default)
def _batch_norm_backward(call: Call) -> Results:
    given, dims = _batch_norm_input(call)
    rest = [None if v is None else constant(v) for v in call.result[1:]]
    for name in ("grad_out", "input"):
        call.fill(name, 0)
    if call["train"]:
        count = structure.product(f for d in dims for f in given[d])

        def rewrite(w: Writer, args: Arguments) -> Any:
            x, gradient = args["input"], args["grad_out"]
            dtype, wide = x.meta["val"].dtype, args["save_mean"].meta["val"].dtype
            mean = _per_channel(w, args["save_mean"], given)
            rstd = _per_channel(w, args["save_invstd"], given)
            gradient, x = w.cast(gradient, wide), w.cast(x, wide)
            normal = w.emit(aten.mul.Tensor, w.emit(aten.sub.Tensor, x, mean), rstd)
            both = w.emit(aten.mul.Tensor, gradient, normal)
            sums = [w.emit(aten.sum.dim_IntList, v, list(dims), True) for v in (gradient, both)]
            ones, slopes = (w.emit(aten.div.Tensor, total, w.number(count, wide)) for total in sums)
            slopes = w.emit(aten.mul.Tensor, normal, slopes)
            inner = w.emit(aten.sub.Tensor, w.emit(aten.sub.Tensor, gradient, ones), slopes)
            scaled = w.emit(aten.mul.Tensor, inner, rstd)
            weight = args["weight"]
            if weight is not None:
                scaled = w.emit(aten.mul.Tensor, scaled, _per_channel(w, weight, given))
            kind = wide if weight is None else weight.meta["val"].dtype
            flat = [w.cast(w.emit(aten.view.default, v, [-1]), kind) for v in sums]
            results = [w.cast(scaled, dtype), flat[1], flat[0]]
            return [r if v is not None else None for r, v in zip(results, call.result, strict=True)]

        call.rewrite(rewrite)
    return _masked_results(call, [given, *rest])


# --- Layers that treat each sample of a batch alike ----------------------------------------------


def _only_batches(call: Call, *names: str) -> Structure:
    """The structure of operands that are padded in their first dimension only."""
    given = call.of(names[0])
    for name in names:
        dims = call.of(name)
        if call.is_padded(*dims[1:]):
            raise NotPaddableError("mixes elements of a dimension whose size varies")
        call.require_same(given[:1], dims[:1])
    return given


def _like(call: Call, given: Structure, value: Any) -> Structure:
    """A result with the batch of an operand."""
    return (given[0], *constant(value)[1:])


@rule(aten.convolution.default)
def _convolution(call: Call) -> Structure:
    call.require_constant("weight", "bias")
    return _like(call, _only_batches(call, "input"), call.result)


@rule(aten.convolution_backward.default)
def _convolution_backward(call: Call) -> Results:
    call.require_constant("weight")
    given = _only_batches(call, "input", "grad_output")
    for name in ("grad_output", "input"):
        call.fill(name, 0, [0])
    rest = [None if v is None else constant(v) for v in call.result[1:]]
    return _masked_results(call, [given, *rest])


@rule(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_bicubic2d.default,
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d_backward.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad2d.default,
    sizes=("input_size",),
)
def _each_sample(call: Call) -> Results:
    given = _only_batches(call, *call.tensors())
    if isinstance(call.result, (list, tuple)):
        return [_like(call, given, v) for v in call.result]
    return _like(call, given, call.result)


# --- Embeddings ----------------------------------------------------------------------------------


@rule(aten.embedding.default)
def _embedding(call: Call) -> Structure:
    call.require_constant("weight")
    call.fill("indices", 0)
    return (*call.of("indices"), call.of("weight")[1])


@rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: Call) -> Structure:
    if call["scale_grad_by_freq"]:
        raise NotPaddableError("counts how often an index comes")
    for name in ("grad_output", "indices"):
        call.fill(name, 0)
    return constant(call.result)


# --- Losses --------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2


def _check_classes(call: Call) -> None:
    call.require_constant("weight")
    given = call.of("self")
    if call.is_padded(given[1] if len(given) > 1 else given[0]):
        raise NotPaddableError("has classes whose number varies")


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll(call: Call) -> Results:
    """Targets to be ignored count for nothing, neither in the sum nor in its divisor."""
    _check_classes(call)
    call.fill("target", call["ignore_index"])
    call.fill("self", 0, [d for d in range(len(call.of("self"))) if d != 1])
    loss = call.of("target") if call["reduction"] == _NONE else ()
    return [loss, ()]


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_backward(call: Call) -> Structure:
    _check_classes(call)
    call.fill("target", call["ignore_index"])
    call.fill("grad_output", 0)
    return call.of("self")


_LOSSES = {
    aten.mse_loss.default: aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default: aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default: aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default: aten.binary_cross_entropy_backward.default,
    aten.soft_margin_loss.default: aten.soft_margin_loss_backward.default,
}


def _elements(call: Call) -> Structure:
    """The structure of the elements' losses."""
    names = [n for n in call.tensors() if n != "grad_output"]
    return structure.broadcast([call.of(n) for n in names], call.padded)


@rule(*_LOSSES, aten.binary_cross_entropy_with_logits.default)
def _loss(call: Call) -> Structure:
    """Losses of elements, which are reduced apart."""
    given = _elements(call)
    reduction = call["reduction"]
    if reduction == _NONE:
        return given
    target: Any = call.node.target
    count = structure.product(f for dim in given for f in dim)
    dtype = call.result.dtype

    def rewrite(w: Writer, args: Arguments) -> Any:
        each = _call(w, target, {**args, "reduction": _NONE})
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        total = w.emit(aten.sum.default, w.fill(each, given, 0), dtype=wide)
        if reduction == _MEAN:
            total = w.emit(aten.div.Tensor, total, w.number(count, wide))
        return w.cast(total, dtype)

    call.rewrite(rewrite)
    return ()


@rule(*_LOSSES.values())
def _loss_backward(call: Call) -> Structure:
    given = _elements(call)
    if call["reduction"] == _MEAN:
        target: Any = call.node.target
        count = structure.product(f for dim in given for f in dim)
        dtype = call.result.dtype

        def rewrite(w: Writer, args: Arguments) -> Any:
            total = _call(w, target, {**args, "reduction": _SUM})
            wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
            share = w.emit(aten.div.Tensor, w.cast(total, wide), w.number(count, wide))
            return w.cast(share, dtype)

        call.rewrite(rewrite)
    return given


def _call(w: Writer, target: Any, given: Arguments) -> Any:
    return w.emit(target, *[given[a.name] for a in target._schema.arguments])
