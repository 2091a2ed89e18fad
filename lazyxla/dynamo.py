"""The ``torch.compile(backend="lazyxla")`` backend.

Dynamo and AOTAutograd trace the function into FX graphs of ATen operators: one for inference, two
for training (forward and backward). Each graph becomes one node of the pending graph, so in lazy
mode a whole training step is still one program, without recording its operators again; in eager
mode each graph runs at once.

A graph that cannot be one node (symbolic sizes, tensors of other devices, an operator that runs on
the host) is recorded operator by operator at each call instead: the same results, more to record.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lazyxla import _C
from lazyxla.lowering import registry

_numbers = itertools.count()


def backend(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compiles what Dynamo traced. Called by ``torch.compile``, not by users.

    Raises:
        ValueError: ``torch.compile`` was given ``options``; there are none yet.
    """
    from torch._dynamo.backends.common import aot_autograd

    if options.get("options"):
        raise ValueError(f"the lazyxla backend has no options, got {options['options']!r}")
    return aot_autograd(fw_compiler=_compile, bw_compiler=_compile)(module, inputs)


def _compile(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    plan = _one_node(module)
    if plan is None:
        return make_boxed_func(module)
    call, tensors, constants = plan

    def run(args: list[Any]) -> list[Any]:
        values = list(args)
        args.clear()  # boxed: the caller's references go, so that memory can be given away
        results = iter(call(values) if tensors else ())
        return [next(results) if position in tensors else constant
                for position, constant in enumerate(constants)]  # fmt: skip

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _one_node(module: fx.GraphModule) -> tuple[Any, set[int], list[Any]] | None:
    """The recorded form of a graph: its call, which outputs are tensors, and the other outputs.

    None if the graph cannot be one node.
    """
    nodes = list(module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    if not placeholders or not all(_is_static(n.meta.get("val")) for n in placeholders):
        return None
    if any(n.op == "call_function" and not _lowers(n) for n in nodes):
        return None
    if any(n.op not in ("placeholder", "call_function", "output") for n in nodes):
        return None
    (output,) = (n for n in nodes if n.op == "output")
    listed = list(output.args[0]) if isinstance(output.args[0], (list, tuple)) else [output.args[0]]
    tensors = {i for i, n in enumerate(listed) if isinstance(n, fx.Node)}
    specs = []
    for i in sorted(tensors):
        value = listed[i].meta.get("val")
        if not _is_static(value):
            return None
        specs.append((value.dtype, list(value.shape), list(value.stride())))
    random = any(
        torch.Tag.nondeterministic_seeded in n.target.tags
        for n in nodes
        if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)
    )
    number = next(_numbers)
    output.args = ([listed[i] for i in sorted(tensors)],)
    registry.graphs[number] = module
    call = _C.TracedGraph(number, len(placeholders), specs, random)
    return call, tensors, [None if i in tensors else n for i, n in enumerate(listed)]


def _is_static(value: Any) -> bool:
    """Whether it is a tensor of ours of known shape."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "lazyxla"
        and all(isinstance(n, int) for n in (*value.shape, *value.stride()))
    )


def _lowers(node: fx.Node) -> bool:
    """Whether an FX call can be lowered with the graph, on static shapes and on our device."""
    import operator

    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    values = node.meta.get("val")
    parts = values if isinstance(values, (list, tuple)) else [values]
    if not all(part is None or _is_static(part) for part in parts):
        return False
    from lazyxla.lowering.decompose import schema_name

    return registry.how(schema_name(node.target)) != "host"
