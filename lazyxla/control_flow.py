"""``torch.cond``, ``while_loop``, ``scan`` and ``map`` outside ``torch.compile``: recorded.

PyTorch runs a branch or a loop in Python, which reads the condition, or records as many operators
as a loop has steps. Here the functions are traced, once for the shapes and dtypes of their
operands, and the call is one node of the pending graph (lowering/control_flow.py). Gradients are
calls of the same kind. What cannot be lowered is run as PyTorch does.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from lazyxla.lowering.fx_graph import FxGraph
from lazyxla.runtime import BACKEND

_library = torch.library.Library("lazyxla", "FRAGMENT")
_library.define("control_flow(Tensor[] inputs, str name) -> Tensor[]")

_LISTS = (list, tuple)

by_name: dict[str, FxGraph] = {}
"""Every call that was traced, by a name that is made of its content: recorded calls have that."""

_traced: weakref.WeakKeyDictionary[Any, dict[Any, str | None]] = weakref.WeakKeyDictionary()
"""Names by the first function of a call, and what else the call depends on; None: run it as PyTorch
does."""


@torch.library.register_fake("lazyxla::control_flow", lib=_library)
def _(inputs: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
    values = [node.meta["val"] for node in by_name[name].outputs]
    return [inputs[0].new_empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]


def install() -> None:
    """Registers the device's implementations."""
    from torch._higher_order_ops.cond import cond_op
    from torch._higher_order_ops.map import map_impl
    from torch._higher_order_ops.scan import scan_op
    from torch._higher_order_ops.while_loop import while_loop_op

    operators: tuple[Any, ...] = (cond_op, map_impl, scan_op, while_loop_op)
    for op in operators:
        op.py_impl(DispatchKey.PrivateUse1)(functools.partial(_record, op))


def _record(op: Any, *args: Any, **options: Any) -> Any:
    """From torch 2.15 on, `options` say which arguments a function writes to."""
    leaves, tree = pytree.tree_flatten(args)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    devices = {x.device for x in tensors}
    name = None
    if len(devices) == 1 and tensors[0].device.type == BACKEND and not any(options.values()):
        name = _name_of(op, leaves, tree)
    if name is None:
        return op.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **options)
    return tuple(torch.ops.lazyxla.control_flow(tensors, name))


def _name_of(op: Any, leaves: list[Any], tree: Any) -> str | None:
    """The name of a call, which is traced if it is new."""
    functions = [leaf for leaf in leaves if callable(leaf)]
    key = (
        op.name(),
        tree,
        *functions[1:],
        *((x.dtype, x.shape, x.stride()) if isinstance(x, torch.Tensor) else None for x in leaves),
        *(leaf for leaf in leaves if isinstance(leaf, (bool, int, float))),
    )
    known = _traced.setdefault(functions[0], {})
    if key not in known:
        known[key] = _trace(op, leaves, tree)
    return known[key]


def _trace(op: Any, leaves: list[Any], tree: Any) -> str | None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from lazyxla.dynamo.partition import lowers

    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    carried = next(arg for arg in pytree.tree_unflatten(leaves, tree) if isinstance(arg, _LISTS))
    if op.name() != "cond" and not all(isinstance(x, torch.Tensor) for x in carried):
        return None  # a number that changes from step to step

    def call(*tensors: torch.Tensor) -> Any:
        values = list(leaves)
        for i, tensor in zip(places, tensors, strict=True):
            values[i] = tensor
        return op(*_without_numbers(pytree.tree_unflatten(values, tree)))

    trace: Callable[..., fx.GraphModule] = make_fx(
        call, tracing_mode="fake", _allow_non_fake_inputs=True
    )
    module = trace(*(leaves[i] for i in places))
    graph = FxGraph.of(module.graph)
    calls = [n for n in graph.nodes if n.op == "call_function" and n.target is op]
    if len(calls) != 1 or not all(map(lowers, calls)):
        return None
    if any(isinstance(n, torch.SymInt) for x in graph.outputs for n in x.meta["val"].shape):
        return None  # branches of which each returns another shape
    if any(x.device.type == BACKEND for x in _constants(module)):
        return None  # it is no operand, and may be written to before the next call
    name = _content_of(module, [leaves[i] for i in places])
    by_name.setdefault(name, graph)
    return name


def _without_numbers(args: Sequence[Any]) -> list[Any]:
    """The same call with the numbers among its operands, such as sizes, in its functions."""
    operands = [x for arg in args if isinstance(arg, _LISTS) for x in arg]
    numbers = [None if isinstance(x, torch.Tensor) else x for x in operands]
    if not any(number is not None for number in numbers):
        return list(args)

    def filled(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            return function(*(next(given) if n is None else n for n in numbers))

        return call

    return [
        filled(arg)
        if callable(arg)
        else [x for x in arg if isinstance(x, torch.Tensor)]
        if isinstance(arg, _LISTS)
        else arg
        for arg in args
    ]


def _constants(module: fx.GraphModule) -> Iterator[torch.Tensor]:
    """Tensors that the functions have captured, or made of Python's numbers."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            attributes = (
                getattr(part, str(n.target)) for n in part.graph.find_nodes(op="get_attr")
            )
            yield from (x for x in attributes if isinstance(x, torch.Tensor))


def _content_of(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str:
    content = hashlib.sha256(repr([(x.dtype, x.shape, x.stride()) for x in inputs]).encode())
    for name, part in module.named_modules():
        if isinstance(part, fx.GraphModule):
            content.update(f"{name}:{part.code}".encode())
    for constant in _constants(module):
        content.update(repr((constant.dtype, constant.tolist())).encode())
    return content.hexdigest()[:32]
