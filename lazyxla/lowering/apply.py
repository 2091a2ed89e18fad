"""Lowering one operator call: own rule, JAX rule, PyTorch's decomposition, or a host call."""

import inspect
from typing import Any

import torch

from lazyxla.lowering import registry
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.program import TensorSpec


def apply(b: Builder, name: str, args: tuple[Any, ...]) -> list[Any]:
    """Lowers operator `name` on values and Scalars; the results have the types of `b.outputs`."""
    outputs = b.outputs
    function = registry.find_rule(name)
    try:
        if function is not None:
            results = function(b, *args)
        elif (jax_rule := registry.find_jax_rule(name)) is not None:
            results = _apply_jax(b, jax_rule, args)
        elif b.platform == "cpu" and registry.how(name) == "call":
            from lazyxla.lowering.host_call import host_call

            results = host_call(b, name, args)
        else:
            from lazyxla.lowering.decompose import decompose

            results = decompose(b, name, args)
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(f"{_call(b, name, args)} cannot be lowered: {error}") from error
    listed = list(results) if isinstance(results, (list, tuple)) else [results]
    # None is an undefined tensor, such as a gradient that nobody wants.
    listed = [x for x in listed if x is not None]
    if len(listed) != len(outputs):
        raise LoweringError(
            f"{_call(b, name, args)}: the rule returned {len(listed)} results, "
            f"expected {len(outputs)}"
        )
    return [_fit(b, name, args, x, spec) for x, spec in zip(listed, outputs, strict=True)]


def _fit(b: Builder, name: str, args: tuple[Any, ...], x: Any, spec: TensorSpec) -> Any:
    """The result in its expected dtype; another shape than expected is an error."""
    found = b.mlir.spec(x.type)
    if found == spec:
        return x
    if found.shape != tuple(spec.shape):
        raise LoweringError(
            f"{_call(b, name, args)}: the rule returned shape {list(found.shape)}, "
            f"expected {list(spec.shape)}"
        )
    return b.convert(x, spec.dtype)


def _apply_jax(b: Builder, jax_rule: registry.JaxRule, args: tuple[Any, ...]) -> Any:
    parameters = inspect.signature(jax_rule.function).parameters
    named = list(parameters)[: len(args)]
    traced, static, lists = [], {}, {}
    for parameter, arg in zip(named, args, strict=True):
        if parameter in jax_rule.static:
            static[parameter] = _plain(arg)
        elif _is_operand(arg):
            traced.append((parameter, arg))
        elif isinstance(arg, (list, tuple)) and any(_is_operand(a) for a in arg):
            lists[parameter] = len(arg)
            traced.extend((parameter, a) for a in arg)
        else:
            static[parameter] = tuple(arg) if isinstance(arg, list) else arg
    if "outputs" in parameters:
        static["outputs"] = b.outputs
    order = tuple(parameter for parameter, _ in traced)
    shim = _shim(jax_rule.function, order, tuple(lists))
    return b.call_jax(shim, *[value for _, value in traced], **static)


_shims: dict[Any, Any] = {}


def _shim(function: Any, order: tuple[str, ...], lists: tuple[str, ...]) -> Any:
    """`function` with its traced arguments given positionally: one object per case, for caching."""
    key = (function, order, lists)
    if key not in _shims:
        positional = set(inspect.signature(function).parameters)

        def shim(*arrays: Any, **static: Any) -> Any:
            given: dict[str, Any] = {name: [] for name in lists}
            for name, array in zip(order, arrays, strict=True):
                if name in lists:
                    given[name].append(array)
                else:
                    given[name] = array
            return function(**{n: v for n, v in {**given, **static}.items() if n in positional})

        shim.__name__ = function.__name__
        _shims[key] = shim
    return _shims[key]


def _is_operand(arg: Any) -> bool:
    from lazyxla.lowering.scalar import Scalar

    return isinstance(arg, Scalar) or hasattr(arg, "owner")


def _plain(arg: Any) -> Any:
    from lazyxla.lowering.scalar import Scalar

    if isinstance(arg, (list, tuple)):
        return tuple(_plain(a) for a in arg)
    return arg.item() if isinstance(arg, Scalar) else arg


def _call(b: Builder, name: str, args: tuple[Any, ...]) -> str:
    """The call as an error message shows it: aten::mm(float32[2, 3], float32[3, 4])."""

    def show(arg: Any) -> str:
        if hasattr(arg, "owner"):
            dtype, shape = b.mlir.spec(arg.type)
            return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        if isinstance(arg, (list, tuple)) and not isinstance(arg, torch.Size):
            return "[" + ", ".join(map(show, arg)) + "]"
        return repr(arg)

    return f"{name}({', '.join(map(show, args))})"
