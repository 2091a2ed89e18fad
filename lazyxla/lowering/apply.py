"""Lowering one operator call: own rule, JAX rule, PyTorch's decomposition, or a host call."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

from lazyxla.compat import signature_of
from lazyxla.lowering import host_call, registry
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.decompose import decompose
from lazyxla.lowering.errors import LoweringError, is_users, show_call
from lazyxla.lowering.jax_call import call_jax
from lazyxla.lowering.operators import find_decomposition
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.rules.formula import is_operand
from lazyxla.lowering.scalar import plain
from lazyxla.lowering.value import Value


def apply(b: Builder, name: str, args: tuple[Any, ...]) -> list[Any]:
    """Lowers operator `name` on values and Scalars; the results have the types of `b.outputs`."""
    if name.startswith("aten::") and b.outputs and all(0 in spec.shape for spec in b.outputs):
        # There is nothing to compute. XLA's CPU compiler divides by zero at integers' quotients
        # without elements, which ends the process.
        return [b.zeros(list(spec.shape), spec.dtype) for spec in b.outputs]
    try:
        for of_platform in (b.platform, None):
            rule = registry.find_rule(name, of_platform)
            results = NotImplemented if rule is None else rule(b, *args)
            if results is not NotImplemented:
                return _fit(b, results)
        platform = b.platform if b.target.host_calls else None
        if (jax_rule := registry.find_jax_rule(name, platform)) is not None:
            return _fit(b, apply_jax(b, jax_rule, args))
        return _apply_none(b, name, args)
    except LoweringError:
        raise
    except Exception as error:
        text = f"{show_call(name, args)} cannot be lowered: {error}{user_line(name, error)}"
        raise LoweringError(text) from error


def _apply_none(b: Builder, name: str, args: tuple[Any, ...]) -> list[Any]:
    """Lowers an operator without a rule."""
    callable_here = b.takes_host_calls and host_call.possible(name)
    if find_decomposition(name) is not None:
        try:
            return _fit(b, decompose(b, name, args))
        except Exception:
            # The operations that it made so far are dead code.
            if not callable_here:
                raise
    if not callable_here:
        raise NotImplementedError("there is no rule, JAX rule or decomposition for it")
    return _fit(b, host_call.host_call(b, name, args))


def _fit(b: Builder, results: Any) -> list[Any]:
    """The results in their expected dtypes; another number or shape than expected is an error."""
    listed = list(results) if isinstance(results, (list, tuple)) else [results]
    # None is an undefined tensor, such as a gradient that is not needed.
    listed = [x for x in listed if x is not None]
    if len(listed) != len(b.outputs):
        raise ValueError(f"the rule returned {len(listed)} results, expected {len(b.outputs)}")
    return [_fit_one(b, x, spec) for x, spec in zip(listed, b.outputs, strict=True)]


def _fit_one(b: Builder, x: Any, spec: TensorSpec) -> Any:
    if not isinstance(x, Value):
        raise TypeError(f"the rule returned {type(x).__name__}, expected a value of the builder's")
    found = b.spec(x)
    if found == spec:
        return x
    if found.shape != tuple(spec.shape):
        raise ValueError(
            f"the rule returned shape {list(found.shape)}, expected {list(spec.shape)}"
        )
    return b.convert(x, spec.dtype)


def user_line(name: str, error: Exception) -> str:
    """Where in a user's rule an error arose, or where that rule is; empty for our own rules."""
    jax_rule = registry.find_jax_rule(name)
    function = registry.find_rule(name) or (jax_rule.function if jax_rule else None)
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if code is None or not is_users(code.co_filename):
        return ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f" ({frame.filename}:{frame.lineno}, in {frame.name})"
    return f" ({code.co_filename}:{code.co_firstlineno}, in {code.co_name})"


def apply_jax(
    b: Builder,
    jax_rule: registry.JaxRule,
    args: tuple[Any, ...],
    lowered_as: str | None = None,
) -> Any:
    """The results of a JAX rule on the arguments. JAX lowers it for its platform `lowered_as`."""
    parameters = signature_of(jax_rule.function).parameters
    named = list(parameters)[: len(args)]
    if len(named) < len(args):
        raise TypeError(
            f"its JAX rule takes {len(named)} arguments, the operator's schema has {len(args)}"
        )
    traced, static, lists = [], {}, {}
    for parameter, arg in zip(named, args, strict=True):
        if parameter in jax_rule.static:
            static[parameter] = plain(arg)
        elif is_operand(arg):
            traced.append((parameter, arg))
        elif isinstance(arg, (list, tuple)) and any(is_operand(a) for a in arg):
            lists[parameter] = len(arg)
            traced.extend((parameter, a) for a in arg)
        else:
            static[parameter] = tuple(arg) if isinstance(arg, list) else arg
    if "outputs" in parameters:
        static["outputs"] = b.outputs
    order = tuple(parameter for parameter, _ in traced)
    shim = _shim(jax_rule.function, order, tuple(lists))
    return call_jax(b, shim, tuple(value for _, value in traced), static, lowered_as)


_shims: dict[Any, Any] = {}


def _shim(function: Any, order: tuple[str, ...], lists: tuple[str, ...]) -> Any:
    """`function` with its traced arguments given positionally: one object per case, for caching."""
    key = (function, order, lists)
    if key not in _shims:
        positional = set(signature_of(function).parameters)

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
