"""Results of a graph with symbolic sizes that are views.

AOTAutograd makes a result that is a view of an argument, or of another result, once more outside
the graph. With static sizes it applies the view operators again; with symbolic ones it takes the
sizes, strides and storage offset of the tensor that the graph returns. So that must be a view, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lazyxla.dynamo.execution import memory_of

_COUNT = "lazyxla_user_results"  # in the meta of a forward graph's output


@dataclass(frozen=True, slots=True)
class ResultView:
    """A view of an argument or of another result, of which the graph itself returns nothing."""

    position: int  # among the results
    is_of_argument: bool
    base: int  # its position among the arguments or the results
    meta: Any  # a fake tensor
    start: Any  # the storage offset of the base's fake tensor

    def of(self, base: torch.Tensor, evaluate: Any) -> torch.Tensor:
        """The view. `evaluate`: from a symbolic number to its value."""
        sizes, strides = ([evaluate(n) for n in s] for s in (self.meta.shape, self.meta.stride()))
        start, dtype = evaluate(self.start), self.meta.dtype
        if base.is_complex() and not dtype.is_complex:
            base, start = torch.view_as_real(base), 2 * start
        offset = base.storage_offset() + evaluate(self.meta.storage_offset()) - start
        return base.as_strided(sizes, strides, offset).view(dtype)


def note_user_results(forward: fx.Graph, count: int) -> None:
    """Notes how many results are the user's; the others are kept for the backward graph."""
    forward.output_node().meta[_COUNT] = count


def take_views(graph: fx.Graph) -> list[ResultView]:
    """The views among the user's results, in whose places the graph returns None from now on."""
    output = graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    arguments = graph.find_nodes(op="placeholder")
    members = {node for node in graph.nodes if node.op == "call_function"}
    # What is written to an argument is what the argument is, once the graph has run.
    written = {
        node.args[1]: node.args[0]
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    }
    found = []
    for position, node in enumerate(results[: output.meta.get(_COUNT)]):
        if not isinstance(node, fx.Node) or node not in members:
            continue
        root = memory_of(node, {*members, *arguments})
        base = written.get(root, root)
        if base in written.values() and base is root:
            continue  # what an argument was before
        meta: Any = node.meta.get("val")
        root_meta: Any = root.meta.get("val")
        if node is root or not _share(meta, root_meta, base.meta.get("val")):
            continue
        is_of_argument = base in arguments
        begins = isinstance(meta.storage_offset(), int) and meta.storage_offset() == 0
        if not is_of_argument and (base not in results or begins):
            continue
        place = (arguments if is_of_argument else results).index(base)
        found.append(ResultView(position, is_of_argument, place, meta, root_meta.storage_offset()))
    for view in found:
        results[view.position] = None
    output.args = (tuple(results),)
    return found


def _share(meta: Any, root: Any, base: Any) -> bool:
    """Whether tensors are elements of the same memory, as their layout has it."""
    if not all(isinstance(x, torch.Tensor) for x in (meta, root, base)):
        return False
    same = meta.dtype.itemsize in (base.dtype.itemsize, base.dtype.to_real().itemsize)
    # As text: to compare symbolic numbers would decide on their values.
    return same and root.dtype == base.dtype and str(root.stride()) == str(base.stride())
