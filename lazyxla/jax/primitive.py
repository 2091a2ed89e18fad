"""The primitive by which JAX calls a function of PyTorch's, and what JAX's transformations make of
it. Imported once JAX is there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from lazyxla import _C, runtime
from lazyxla.jax.flat_functions import is_differentiable
from lazyxla.jax.torch_functions import TorchFunction
from lazyxla.lowering.jax_call import numpy_dtype

_primitive = Primitive("torch_call")
_primitive.multiple_results = True


def call(function: TorchFunction, key: Any, arrays: Sequence[Any]) -> list[Any]:
    """The function's results. `key`: uint32[2]; needed if the function is random."""
    given = [key, *arrays] if function.random else arrays
    return list(_primitive.bind(*given, function=function))


def _parted(function: TorchFunction, given: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The key and the arguments."""
    return (given[0], given[1:]) if function.random else (None, given)


@_primitive.def_impl
def _run(*given: Any, function: TorchFunction) -> Any:
    return _compiled(function)(*given)


@functools.lru_cache(maxsize=1024)
def _compiled(function: TorchFunction) -> Any:
    return jax.jit(lambda *given: _primitive.bind(*given, function=function))


@_primitive.def_abstract_eval
def _types(*given: Any, function: TorchFunction) -> Any:
    return [jax.core.ShapedArray(s, numpy_dtype(d)) for d, s in function.outputs]


def _jvp(given: Sequence[Any], tangents: Sequence[Any], *, function: TorchFunction) -> Any:
    results = _primitive.bind(*given, function=function)
    key, args = _parted(function, given)
    moving = _parted(function, tangents)[1]
    variables = tuple(
        i
        for i, tangent in enumerate(moving)
        if type(tangent) is not ad.Zero and is_differentiable(function.inputs[i][0])
    )
    known = function.differentiable_outputs if variables else []
    found: Any = iter(())
    if known:
        pushed = function.pushforward(variables)
        found = iter(call(pushed, key, [*args, *(moving[i] for i in variables)]))
    return results, [
        next(found) if i in known else ad.Zero(jax.typeof(x).to_tangent_aval())
        for i, x in enumerate(results)
    ]


def _transpose(cotangents: Sequence[Any], *given: Any, function: TorchFunction) -> list[Any]:
    key, args = _parted(function, given)
    assert function.derived_from is not None, "only tangents are linear"
    of, variables = function.derived_from
    count = len(of.inputs)
    dense = [ad.instantiate_zeros(x) for x in cotangents]
    found = call(of.pullback(variables), key, [*args[:count], *dense])
    return [None] * (len(given) - len(found)) + found


def _batch(given: Sequence[Any], axes: Sequence[Any], *, function: TorchFunction) -> Any:
    (size,) = {x.shape[axis] for x, axis in zip(given, axes, strict=True) if axis is not None}
    if function.random and axes[0] is not None:
        results = _one_by_one(given, axes, function)
    else:
        key, args = _parted(function, given)
        batched = function.batched(tuple(_parted(function, axes)[1]), size)
        results = call(batched, key, args)
    return results, [0] * len(results)


def _one_by_one(given: Sequence[Any], axes: Sequence[Any], function: TorchFunction) -> list[Any]:
    """For samples that have keys of their own: PyTorch draws for all of them at once, or the same
    for each."""
    stacked = [
        jax.numpy.moveaxis(x, axis, 0)
        for x, axis in zip(given, axes, strict=True)
        if axis is not None
    ]

    def one(sample: Sequence[Any]) -> Any:
        parts = iter(sample)
        filled = [x if a is None else next(parts) for x, a in zip(given, axes, strict=True)]
        return _primitive.bind(*filled, function=function)

    return list(jax.lax.map(one, stacked))


def _lower(context: Any, *values: Any, function: TorchFunction, platform: str | None = None) -> Any:
    if platform is None:  # what we lower for CUDA, JAX lowers for a platform that it knows not of
        platform = _C.captured_platform() or runtime.platform()
    symbols = context.module_context.symbol_table
    name = f"torch_call_{id(function):x}_{platform}"
    if name not in symbols:
        module = ir.Module.parse(function.bytecode(platform))
        name = mlir.merge_mlir_modules(context.module_context.module, name, module, symbols)
    call_op: Any = func.CallOp
    return list(call_op(symbols[name], [*values, *_sizes(context, function)]).results)


def _sizes(context: Any, function: Any) -> list[Any]:
    """Those of the variables of a function with symbolic dimensions, as its module takes them."""
    known = context.module_context.shape_poly_state.dim_vars
    values = dict(zip(known, context.dim_var_values, strict=True))
    i64 = ir.RankedTensorType.get([], ir.IntegerType.get_signless(64))
    return [stablehlo.convert(i64, values[name]) for name in function.size_names]


ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, _lower)
for _platform in ("cpu", "cuda", "tpu"):
    mlir.register_lowering(
        _primitive, functools.partial(_lower, platform=_platform), platform=_platform
    )
