"""What the forward graph keeps for the backward graph.

AOTAutograd's forward graph of a linear layer returns its weight transposed, for the backward graph.
Such a result would be a copy, made at every call. The weight itself is there anyway: it is returned
instead, and the backward graph transposes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from lazyxla.dynamo import padding

# Where the partitioner notes that a saved tensor may be written before it is used. It sorts what is
# saved by this note, and so does who reads it.
_UNCHECKED = "saved_tensor_with_no_vc_check"


def partition_joint_graph(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **how: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's default partition, with views of arguments replaced by the arguments.

    Whether sizes are padded is decided before, for both graphs.
    """
    from torch._functorch.partitioners import default_partition

    padding.plan(joint.graph)
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **how)
    (output,) = forward.graph.find_nodes(op="output")
    received = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    first = next(n for n in backward.graph.nodes if n.op != "placeholder")
    results = list(output.args[0])
    for i in range(num_fwd_outputs, len(results)):
        views = _views_of_argument(results[i])
        if not views or views[-1].name not in received:
            continue
        argument, placeholder = views[0].args[0], received[views[-1].name]
        if argument.meta.get(_UNCHECKED) != results[i].meta.get(_UNCHECKED):
            continue
        users = list(placeholder.users)
        value = placeholder
        with backward.graph.inserting_before(first):
            for view in views:
                value = backward.graph.create_node(
                    "call_function", view.target, (value, *view.args[1:]), view.kwargs
                )
                value.meta = dict(view.meta)
        for user in users:
            user.replace_input_with(placeholder, value)
        placeholder.meta = dict(argument.meta)
        results[i] = argument
    output.args = (tuple(results),)
    for module in (forward, backward):
        module.graph.eliminate_dead_code()
        module.recompile()
    padding.hand_on(joint.graph, forward.graph, backward.graph, num_fwd_outputs)
    return forward, backward


def _views_of_argument(node: Any) -> list[Any]:
    """The operators that make a node's tensor as a view of an argument; empty if they do not, or if
    the argument is written."""
    views: list[Any] = []
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not isinstance(node.target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1:
            return []
        arguments = node.target._schema.arguments
        returns = node.target._schema.returns
        is_view = len(returns) == 1 and arguments and arguments[0].alias_info is not None
        if not is_view or not isinstance(node.meta.get("val"), torch.Tensor):
            return []
        views.insert(0, node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or any(_writes(user, node) for user in node.users):
        return []
    return views


def _writes(user: fx.Node, argument: fx.Node) -> bool:
    target = user.target
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutable and user.args[0] is argument
