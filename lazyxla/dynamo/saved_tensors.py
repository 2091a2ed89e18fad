"""What the forward graph keeps for the backward graph.

AOTAutograd's forward graph of a linear layer returns its weight transposed, for the backward graph,
and that of an attention layer returns its input three times, flattened for each projection. Each
such result would be a copy, made at every call, and a tensor for autograd to save and unpack. So
of all views of the same tensor one is kept, the tensor itself where that is no larger than they
are together, and the backward graph makes the others from it.

What a random operator made is kept also where a checkpoint has the rest computed again.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazyxla.dynamo import padding
from lazyxla.dynamo.result_views import note_user_results

# Where the partitioner notes that a saved tensor may be written before it is used. It sorts what is
# saved by this note, and so does who reads it.
_UNCHECKED = "saved_tensor_with_no_vc_check"


@dataclass
class _View:
    """A saved tensor: a result of the forward graph, an argument of the backward one."""

    saved: fx.Node
    received: fx.Node
    views: list[fx.Node]  # the operators that make it from the tensor it is a view of

    def path(self) -> str:
        """Equal for views that are the same."""
        return repr([(v.target, v.args[1:], sorted(v.kwargs.items())) for v in self.views])


def partition_joint_graph(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **how: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's default partition, with one tensor kept where it keeps several views of it.

    Whether sizes are padded is decided before, for both graphs.
    """
    from torch._functorch.partitioners import default_partition

    padding.plan(joint.graph)
    _keep_random_results(joint.graph)
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **how)
    _share_saved(forward.graph, backward.graph, num_fwd_outputs)
    for module in (forward, backward):
        module.graph.eliminate_dead_code()
        module.recompile()
    note_user_results(forward.graph, num_fwd_outputs)
    note_user_results(backward.graph, 0)
    padding.hand_on(joint.graph, forward.graph, backward.graph, num_fwd_outputs)
    return forward, backward


def _keep_random_results(joint: fx.Graph) -> None:
    """Within a checkpoint (torch.utils.checkpoint), too: the operators would draw other numbers the
    second time. PyTorch can repeat the numbers of some devices only, and refuses the graph else. It
    takes attention for random, with dropout or without."""
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if is_random and "recompute" in node.meta:
            results = [n for n in node.users if n.target is operator.getitem]
            del node.meta["recompute"]
            for result in results or [node]:
                result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _share_saved(forward: fx.Graph, backward: fx.Graph, num_fwd_outputs: int) -> None:
    (output,) = forward.find_nodes(op="output")
    placeholders = {n.name: n for n in backward.find_nodes(op="placeholder")}
    first = next(n for n in backward.nodes if n.op != "placeholder")
    groups: dict[Any, list[_View]] = {}
    for saved in dict.fromkeys(output.args[0][num_fwd_outputs:]):
        if isinstance(saved, fx.Node) and saved.name in placeholders:
            base, views = _origin(saved)
            group = groups.setdefault((base, saved.meta.get(_UNCHECKED)), [])
            group.append(_View(saved, placeholders[saved.name], views))
    kept: dict[fx.Node, fx.Node] = {}  # replaces these results; the other results are dropped
    gone: set[fx.Node] = set()
    for (base, unchecked), group in groups.items():
        if _is_kept_whole(base, unchecked, group):
            owner = group[0].received
            kept[group[0].saved] = base
            # Noted before the first replayed view becomes one of them.
            readers = [(view, list(view.received.users)) for view in group]
            for view, users in readers:
                _replace(users, view.received, _replayed(view.views, owner, first))
            owner.meta = dict(base.meta)
            gone |= {view.saved for view in group[1:]}
        else:
            firsts: dict[str, _View] = {}
            for view in group:
                same = firsts.setdefault(view.path(), view)
                if same is not view:
                    _replace(list(view.received.users), view.received, same.received)
                    gone.add(view.saved)
    for saved in gone:
        backward.erase_node(placeholders[saved.name])
    old = output.args[0]
    stay = [i for i, result in enumerate(old) if i < num_fwd_outputs or result not in gone]
    output.args = (
        tuple(kept.get(old[i], old[i]) if i >= num_fwd_outputs else old[i] for i in stay),
    )
    if "desc" in output.meta:
        output.meta["desc"] = [output.meta["desc"][i] for i in stay]


def _is_kept_whole(base: fx.Node, unchecked: Any, group: list[_View]) -> bool:
    """Whether to keep the tensor that a group's tensors are views of, in place of them."""
    if not any(view.views for view in group) or unchecked != base.meta.get(_UNCHECKED):
        return False
    if base.op == "placeholder":  # it is there anyway
        return True
    distinct = {view.path(): view.saved for view in group}
    sizes = [_nbytes(node) for node in (base, *distinct.values())]
    if len(distinct) == 1 or not all(isinstance(size, int) for size in sizes):
        return False
    return bool(sizes[0] <= sum(sizes[1:]))


def _nbytes(node: fx.Node) -> Any:
    return node.meta["val"].numel() * node.meta["val"].element_size()


def _origin(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The tensor that a node's tensor is a view of, and the operators that make it of that one:
    the node itself and none, if there is no such tensor, or if it or a view of it is written."""
    base, views = node, list[fx.Node]()
    while _is_view(base):
        views.insert(0, base)
        base = base.args[0]  # type: ignore[assignment]
    if any(_writes(user, n) for n in (base, *views) for user in n.users):
        return node, []
    return base, views


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1:
        return False
    schema = node.target._schema
    return bool(
        len(schema.returns) == 1
        and schema.arguments
        and schema.arguments[0].alias_info is not None
        and not schema.is_mutable
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and isinstance(node.args[0].meta.get("val"), torch.Tensor)
    )


def _replayed(views: list[fx.Node], base: fx.Node, before: fx.Node) -> fx.Node:
    """The backward graph's own view of what it receives."""
    value = base
    with before.graph.inserting_before(before):
        for view in views:
            value = before.graph.create_node(
                "call_function", view.target, (value, *view.args[1:]), view.kwargs
            )
            value.meta = dict(view.meta)
    return value


def _replace(users: list[fx.Node], old: fx.Node, new: fx.Node) -> None:
    for user in users:
        user.replace_input_with(old, new)


def _writes(user: fx.Node, argument: fx.Node) -> bool:
    target = user.target
    mutable = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return mutable and argument in user.all_input_nodes
