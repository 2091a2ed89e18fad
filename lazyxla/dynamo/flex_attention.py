"""``flex_attention`` in a graph: the operators that define it, in place of one with functions."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any, cast

from torch import fx
from torch._C import DispatchKey
from torch.utils import _pytree as pytree

from lazyxla import flex_kernel
from lazyxla.lowering import control_flow, lookup


def inline_flex_attention(module: fx.GraphModule) -> None:
    """Replaces each call of it, or of its backward, by what PyTorch computes where it has no
    kernel."""
    from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward

    graph = module.graph
    nodes = [
        node
        for op in (flex_attention, flex_attention_backward)
        for node in graph.find_nodes(op="call_function", target=op)
    ]
    for node in nodes:
        _inline(module, node)
    if nodes:
        graph.eliminate_dead_code()


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, tree = pytree.tree_flatten((node.args, node.kwargs))
    functions = {
        i: getattr(module, str(leaf.target))
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, fx.Node) and control_flow.is_function(leaf)
    }
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and i not in functions
    ]
    compute: Any = _by_kernel(node, functions.values())
    if compute is None:
        compute = node.target.py_kernels[DispatchKey.CompositeExplicitAutograd]  # type: ignore

    def call(*values: Any) -> Any:
        given = list(leaves)
        for i, function in functions.items():
            given[i] = function
        for i, value in zip(places, values, strict=True):
            given[i] = value
        args, kwargs = pytree.tree_unflatten(given, tree)
        return compute(*args, **kwargs)

    traced = make_fx(
        dispatch_functionalize(call), tracing_mode="fake", _allow_non_fake_inputs=True
    )(*(leaves[i].meta["val"] for i in places))
    traced.graph.eliminate_dead_code()
    results = _copy_before(module, node, traced, [leaves[i] for i in places])
    _replace(node, results)


def _by_kernel(node: fx.Node, functions: Collection[fx.GraphModule]) -> Any:
    """The same computation by the operators that TPUs have kernels for; None if they do not support
    this call."""
    from torch._higher_order_ops.flex_attention import _permute_strides, flex_attention

    is_forward = node.target is flex_attention
    inputs = cast("list[fx.Node]", list(node.args[:3]))
    query, key, value = (x.meta["val"] for x in inputs)
    sizes = (*query.shape, *key.shape, *value.shape)
    if lookup.recorded_platform() != "tpu" or not all(isinstance(n, int) for n in sizes):
        return None
    if query.shape[0] != key.shape[0] or query.shape[3] != value.shape[3]:
        return None
    if is_forward and any(user.args[1] == 2 for user in node.users):  # the largest scores
        return None
    if not is_forward and node.args[6] is not None:  # a gradient of the logarithms
        return None
    score_mod, *_, mask_mod = functions
    scored = score_mod.graph.find_nodes(op="placeholder")[0]
    if score_mod.graph.output_node().args[0] not in (scored, (scored,), [scored]):
        return None
    digest = flex_kernel.remember(mask_mod, query.shape[2], key.shape[2])
    if digest is None:
        return None

    def forward(query: Any, key: Any, value: Any, *args: Any) -> Any:
        result, logarithms = flex_kernel.forward(query, key, value, digest, args[2])
        return _permute_strides(result, query.stride()), logarithms, None

    def backward(query: Any, key: Any, value: Any, *args: Any) -> Any:
        result, logarithms, grad, _, _, _, _, scale, *_ = args
        given = (query, key, value, result, logarithms, grad)
        found = flex_kernel.backward(*given, digest, scale)
        strides = [x.stride() for x in given[:3]]
        return *map(_permute_strides, found, strides), ()

    return forward if is_forward else backward


def _copy_before(
    module: fx.GraphModule, node: fx.Node, traced: fx.GraphModule, inputs: Sequence[fx.Node]
) -> Any:
    """Copies a graph to before a node of another; returns what it returns there."""
    graph = module.graph
    placeholders = traced.graph.find_nodes(op="placeholder")
    known: dict[fx.Node, fx.Node] = dict(zip(placeholders, inputs, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "output":
                return fx.map_arg(inner.args[0], known.__getitem__)
            if inner.op == "placeholder":
                continue
            copied = graph.node_copy(inner, known.__getitem__)
            copied.meta.setdefault("stack_trace", node.meta.get("stack_trace"))
            if inner.op == "get_attr":
                name = f"{node.name}{inner.target}"
                setattr(module, name, getattr(traced, str(inner.target)))
                copied.target = name
            known[inner] = copied
    raise AssertionError("a graph without an output")


def _replace(node: fx.Node, results: Any) -> None:
    """Replaces a node's parts, and parts of these, by the results in all users."""
    for user in list(node.users):
        assert user.target is operator.getitem
        part = results[user.args[1]]
        if isinstance(part, fx.Node):
            user.replace_all_uses_with(part)
            node.graph.erase_node(user)
        elif part is not None:
            _replace(user, part)
    if not node.users:
        node.graph.erase_node(node)
