"""Keeps Dynamo out of this package's own functions.

What they do, they do to the device when they are called: a graph must break at the call, not hold
it. Dynamo learns that from two marks. A function's attribute keeps it from being traced into, as
``torch.compiler.disable`` does. Its code's strategy lets it run as it is, with all that it calls,
where a traced function's remains call it. Both are set without importing Dynamo, which takes as
long as importing torch, and cost a call nothing.

A few functions only record an operator, which belongs into a graph: `traced` lets Dynamo see them.
Others do so, but Dynamo cannot trace them: `opaque` are in its graph as they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)

F = TypeVar("F", bound=Callable[..., Any])

_AS_IT_IS = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_WHY = "lazyxla acts on the device when it is called"


def mark(package: str) -> None:
    """Marks the functions and methods of the package's modules, as far as they are imported."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(package + "."):
            for function in _functions(module, name):
                if not hasattr(function, "_lazyxla_traced"):
                    mark_function(function)


def traced(function: F) -> F:
    """Decorates a function that Dynamo is to trace as it does the user's."""
    function._lazyxla_traced = True  # type: ignore[attr-defined]
    return function


def constant(function: F) -> F:
    """Decorates a method that Dynamo calls as it traces, and whose result is a constant to it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return traced(function)


_opaque: weakref.WeakSet[Any] = weakref.WeakSet()


def opaque(function: F) -> F:
    """Decorates a function whose call Dynamo puts into its graph as ``nonstrict_trace`` has it:
    with what it returns for the arguments' types, found by calling it."""
    _opaque.add(function)
    if "torch._dynamo.trace_rules" in sys.modules:
        register_with_dynamo()
    return function


def register_with_dynamo() -> None:
    """Registers the `opaque` functions with Dynamo, which is imported by now."""
    from torch._dynamo import trace_rules

    for function in list(_opaque):
        trace_rules._allowed_callable_ids.add(id(function))
        trace_rules._nonstrict_trace_callable_ids.add(id(function))
        weakref.finalize(function, _forget, id(function))
        _opaque.discard(function)


def _forget(number: int) -> None:
    from torch._dynamo import trace_rules

    trace_rules._allowed_callable_ids.remove(number)
    trace_rules._nonstrict_trace_callable_ids.remove(number)


def mark_function(function: FunctionType) -> None:
    """Marks one function; for those that are made later, by a decorator for example."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    for code in _codes(function.__code__):
        set_code_exec_strategy(code, _AS_IT_IS)


def _functions(owner: ModuleType | type, module: str) -> Iterator[FunctionType]:
    """The functions that are defined in the module, not those that it imports."""
    for value in list(vars(owner).values()):
        if isinstance(value, type) and value.__module__ == module and value is not owner:
            yield from _functions(value, module)
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        found = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for function in found:
            function = getattr(function, "__wrapped__", function)  # of a cache
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """It and those of the functions that are made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
