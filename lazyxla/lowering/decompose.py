"""The last resort of a lowering: PyTorch's own decompositions.

A decomposition is a Python function on tensors. It is traced on fake tensors into a functional
graph of operators that have rules, and that graph is lowered node by node. Numbers are built into
the trace, so their slots become static; an operator for which that costs too many compilations
wants a rule.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.fx_graph import FxGraph, run_graph
from lazyxla.lowering.operators import find_decomposition, find_op
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.scalar import Scalar
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_DEEPEST = 16
"""Nesting of decompositions at which one is taken to run in circles."""


class _Hole(int):
    """Stands for the tensor argument of this index in the arguments of a trace."""


def decompose(b: Builder, name: str, args: tuple[Any, ...]) -> list[Any]:
    """Lowers an operator through its decomposition; `args` as the rules take them."""
    values: list[Any] = []
    specs: list[TensorSpec] = []
    op, function = find_op(name), find_decomposition(name)
    if op is None or function is None:
        raise NotImplementedError("there is no rule, JAX rule or decomposition for it")
    tensors = ["Tensor" in str(a.type) for a in op._schema.arguments]

    def freeze(arg: Any, tensor: bool) -> Any:
        if isinstance(arg, (list, tuple)):
            return tuple(freeze(a, tensor) for a in arg)
        if isinstance(arg, Value) or (isinstance(arg, Scalar) and tensor and not arg.wrapped):
            values.append(b.value(arg))
            specs.append(b.spec(values[-1]))
            return _Hole(len(values) - 1)
        return arg.item() if isinstance(arg, Scalar) else arg

    frozen = tuple(freeze(a, tensor) for a, tensor in zip(args, tensors, strict=True))
    graph = _trace(op, function, tuple(specs), frozen)
    b.depth += 1
    try:
        if b.depth > _DEEPEST:
            raise LoweringError(f"{name}: its decomposition never ends")
        return run_graph(b, FxGraph.of(graph.graph), values)
    except LoweringError as error:
        raise LoweringError(f"{name} is lowered through its decomposition: {error}") from error
    finally:
        b.depth -= 1


@functools.lru_cache(maxsize=1024)
def _trace(
    op: Any, function: Callable[..., Any], specs: tuple[TensorSpec, ...], args: tuple[Any, ...]
) -> torch.fx.GraphModule:
    """The decomposition's functional graph, one level deep: what it calls is lowered by look-up."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes
    from torch.utils._pytree import tree_leaves

    def call(*tensors: torch.Tensor) -> Any:
        def fill(arg: Any) -> Any:
            if isinstance(arg, _Hole):
                return tensors[arg]
            return [fill(a) for a in arg] if isinstance(arg, tuple) else arg

        positional, keywords = [], {}
        for argument, arg in zip(op._schema.arguments, args, strict=True):
            if argument.kwarg_only:
                # Where the schema says None, Python signatures may have better defaults.
                if arg != argument.default_value:
                    keywords[argument.name] = fill(arg)
            else:
                positional.append(fill(arg))
        return tree_leaves(function(*positional, **keywords))

    with _disable_current_modes(), torch.no_grad(), torch.device("cpu"), _unlogged():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            fakes = [torch.empty(s.shape, dtype=s.dtype) for s in specs]
        traced = make_fx(call)(*fakes)
        if _mutates(traced.graph):
            # Not done always, because PyTorch cannot functionalize the views among its prims.
            traced = make_fx(torch.func.functionalize(call, remove="mutations"))(*fakes)
        return traced


@contextmanager
def _unlogged() -> Iterator[None]:
    """Without PyTorch logging what a meta function refuses: the caller hears it as an error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _mutates(graph: torch.fx.Graph) -> bool:
    overloads = (n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload))
    return any(op._schema.is_mutable for op in overloads)
