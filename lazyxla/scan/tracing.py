"""One layer's forward and gradients as a graph, and what of it the loops of a scan compute.

AOTAutograd traces one joint graph: from a layer's tensors, its inputs and the gradients of its
results to the results and the gradients of the inputs. Both loops are parts of that graph. What the
forward loop keeps for the backward loop, the *residuals*, are values of the graph that the backward
part starts from; a remat policy only chooses the residuals.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from lazyxla.determinant import transpose_for_determinants
from lazyxla.dynamo.partition import has_positions_of_masks, lowers
from lazyxla.lowering.fx_graph import DRAW, FxGraph
from lazyxla.lowering.operators import draws, schema_name

aten = torch.ops.aten
Policy = str | frozenset[str]
"""Which values are kept for the backward: "none" is recomputed, all but a layer's inputs are
("full"), or all but the values with these names."""


@dataclass(frozen=True)
class Signature:
    """The inputs of a layer: its tensors, then the carry's leaves, then the constants'."""

    specs: tuple[tuple[torch.Size, torch.dtype, bool], ...]  # shape, dtype, requires a gradient
    layer: int  # how many are the layer's own
    carry: int
    device: torch.device


class Joint:
    """A traced layer. Lists are in the order of the layer's inputs; None: there is no such thing.

    Attributes:
        inputs: placeholders.
        tangents: placeholders of the gradients of the results.
        results: the new carry.
        written: the new value of an input that the layer writes.
        gradients: of the inputs.
    """

    def __init__(self, module: fx.GraphModule, signature: Signature) -> None:
        from torch._functorch._aot_autograd import descriptors as desc

        self.module = module  # the graph's constants are its
        self.signature = signature
        count = len(signature.specs)
        self.inputs: list[fx.Node] = []
        self.tangents: list[fx.Node | None] = [None] * signature.carry
        self.results: list[fx.Node] = [None] * signature.carry  # type: ignore[list-item]
        self.written: list[fx.Node | None] = [None] * count
        self.gradients: list[fx.Node | None] = [None] * count
        found: dict[int, fx.Node] = {}
        for node in module.graph.find_nodes(op="placeholder"):
            role = node.meta["desc"]
            if isinstance(role, desc.TangentAOTInput):
                if not isinstance(role.output, desc.PlainAOTOutput):
                    raise NotImplementedError(
                        "scan_layers: a layer must not write to its arguments, nor values with "
                        "gradients to its buffers"
                    )
                self.tangents[role.output.idx] = node
            else:
                found[role.idx] = node
        self.inputs = [found[i] for i in range(count)]
        (output,) = module.graph.find_nodes(op="output")
        for node, role in zip(output.args[0], output.meta["desc"], strict=True):
            if isinstance(role, desc.PlainAOTOutput):
                self.results[role.idx] = node
            elif isinstance(role, desc.InputMutationAOTOutput):
                self.written[role.mutated_input.idx] = node  # type: ignore[attr-defined]
            elif isinstance(role, desc.GradAOTOutput):
                self.gradients[role.grad_of.idx] = node  # type: ignore[attr-defined]
        for number, node in enumerate(n for n in module.graph.nodes if _draws(n)):
            node.meta[DRAW] = number + 1
        if any(g is not None for g in self.gradients):
            self._complete()

    def _complete(self) -> None:
        """Gives each result of floating point a tangent, and each such part of the carry a
        gradient: what one iteration of the backward makes is what the next one takes."""
        graph, first = self.module.graph, self.signature.layer
        for i, result in enumerate(self.results):
            value = result.meta["val"]
            if not self.signature.specs[first + i][2]:
                continue
            if self.tangents[i] is None:
                with graph.inserting_before(next(iter(graph.nodes))):
                    self.tangents[i] = graph.placeholder(f"no_tangent_{i}")
                self.tangents[i].meta["val"] = value  # type: ignore[union-attr]
            if self.gradients[first + i] is None:
                (output,) = graph.find_nodes(op="output")
                with graph.inserting_before(output):
                    zeros = graph.call_function(
                        aten.full.default, (list(value.shape), 0), {"dtype": value.dtype}
                    )
                zeros.meta["val"] = value
                self.gradients[first + i] = zeros

    def text(self) -> str:
        """The graph, so that graphs of equal text compute the same."""
        lines = []
        for node in self.module.graph.nodes:
            value = node.meta.get("val")
            line = node.format_node(include_tensor_metadata=False)
            if node.op == "get_attr":
                value = getattr(self.module, str(node.target))
            lines.append(f"{line} {value}")
        return "\n".join(lines)

    def forward(self, residuals: Sequence[fx.Node]) -> FxGraph:
        """From the inputs to the new carry, what is written, and the residuals."""
        written = [n for n in self.written if n is not None]
        return self._part(self.inputs, [*self.results, *written, *residuals])

    def backward(self, residuals: Sequence[fx.Node]) -> FxGraph:
        """From the inputs, the residuals and the tangents to the inputs' gradients.

        An input that the layers change, the carry or what they write, is available as a residual
        only.
        """
        tangents = [t for t in self.tangents if t is not None]
        gradients = [g for g in self.gradients if g is not None]
        fixed = [n for i, n in enumerate(self.inputs) if not self._varies(i)]
        return self._part([*fixed, *residuals, *tangents], gradients)

    def fixed(self) -> list[int]:
        """The inputs that the backward gets as they are."""
        return [i for i in range(len(self.inputs)) if not self._varies(i)]

    def _varies(self, i: int) -> bool:
        first = self.signature.layer
        return first <= i < first + self.signature.carry or self.written[i] is not None

    def _part(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> FxGraph:
        """The part of the graph that computes outputs from inputs."""
        given, needed = set(inputs), set[fx.Node]()
        waiting = [n for n in outputs if n not in given]
        while waiting:
            node = waiting.pop()
            if node not in needed:
                needed.add(node)
                waiting += [o for o in node.all_input_nodes if o not in given]
        nodes = [n for n in self.module.graph.nodes if n in needed]
        return FxGraph(list(inputs), nodes, list(outputs))

    def residuals(self, policy: Policy) -> list[fx.Node]:
        """The residuals of each layer, in the graph's order.

        Raises:
            ValueError: the policy has a name that no value of the layer has.
        """
        named = {
            str(n.args[1]): n
            for n in self.module.graph.nodes
            if n.target is torch.ops.lazyxla.checkpoint_name.default
        }
        if not isinstance(policy, str) and (unknown := policy - named.keys()):
            raise ValueError(
                f"remat names {sorted(unknown)}, but the layer's values are named {sorted(named)}"
            )
        later = self._backward_nodes()
        changing = {n for i, n in enumerate(self.inputs) if self._varies(i)}
        kept: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        waiting = [g for g in self.gradients if g is not None]
        while waiting:
            node = waiting.pop()
            if node in changing or self._is_kept(node, policy, later):
                kept.add(node)
            elif node not in seen:
                seen.add(node)
                waiting += node.all_input_nodes
        return [n for n in self.module.graph.nodes if n in kept]

    def _is_kept(self, node: fx.Node, policy: Policy, later: set[fx.Node]) -> bool:
        if policy == "none":
            return node not in later and self._costs(node)
        is_named = node.target is torch.ops.lazyxla.checkpoint_name.default
        return is_named and not isinstance(policy, str) and str(node.args[1]) in policy

    def _backward_nodes(self) -> set[fx.Node]:
        """All that depends on the gradients of the results."""
        later = {t for t in self.tangents if t is not None}
        for node in self.module.graph.nodes:
            if any(o in later for o in node.all_input_nodes):
                later.add(node)
        return later

    def _costs(self, node: fx.Node) -> bool:
        """Whether computing a node of the forward again takes more than reading it: it is no view,
        no cast of a parameter, and not the same in every layer."""
        if node.op != "call_function" or self._is_view(node):
            return False
        if node.target is aten._to_copy.default:
            source: Any = node.args[0]
            while source.op == "call_function" and self._is_view(source):
                source = source.args[0]
            return source.op != "placeholder" or source in self.inputs[self.signature.layer :]
        return self._depends(node)

    def _depends(self, node: fx.Node) -> bool:
        """Whether a value may differ between layers."""
        seen, waiting = set[fx.Node](), [node]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            first = self.signature.layer + self.signature.carry
            if _draws(node) or (node.op == "placeholder" and node not in self.inputs[first:]):
                return True
            waiting += node.all_input_nodes
        return False

    def _is_view(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return self._is_view(node.args[0])  # type: ignore[arg-type]
        if node.target is torch.ops.lazyxla.checkpoint_name.default:
            return True
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload):
            return False
        arguments = target._schema.arguments
        return bool(arguments and arguments[0].alias_info is not None)


def trace(call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], what: Signature) -> Joint:
    """Traces a function of a layer's inputs.

    Raises:
        NotImplementedError: the layer has an operator that a loop cannot run.
        ValueError: the layer reads a tensor that is not one of its inputs.
    """
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch._subclasses import fake_tensor

    class Call(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            # Copies, so that no result is an input, which AOTAutograd would keep to itself.
            return tuple(t.clone() for t in call(tensors))

    with contextlib.ExitStack() as stack:
        # torch.func's transforms around the call apply to its tensors, not to these fakes.
        stack.enter_context(temporarily_clear_interpreter_stack())
        # Outside of autocast a backward does not cast; it is traced within.
        stack.enter_context(config.patch(backward_pass_autocast="off"))
        with fake_tensor.FakeTensorMode():
            fakes = tuple(
                torch.empty(shape, dtype=dtype, device=what.device).requires_grad_(needs)
                for shape, dtype, needs in what.specs
            )
        try:
            joint = aot_export_joint_with_descriptors(stack, Call(), fakes)
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
        ) as error:
            raise NotImplementedError(
                f"scan_layers cannot run {schema_name(error.func)} in a loop: its result, or the "
                "shape of that, would have to be known before the program runs"
            ) from error
        except AssertionError as error:
            if "Please convert all Tensors to FakeTensors" not in str(error):
                raise
            raise ValueError(
                "scan_layers: a layer reads a tensor that is none of its parameters, buffers and "
                "arguments, and would be the same for all layers. Register it as a buffer, or give "
                "it as an argument"
            ) from error
        module = joint.graph_module
    transpose_for_determinants(module.graph)
    _check_lowers(module.graph)
    return Joint(module, what)


def _check_lowers(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        values = [v for v in pytree.tree_leaves(node.meta.get("val")) if v is not None]
        tensors = all(isinstance(v, torch.Tensor) for v in values)
        if not tensors or not lowers(node) or has_positions_of_masks(node):
            target: Any = node.target
            is_operator = isinstance(target, torch._ops.OpOverload)
            name = schema_name(target) if is_operator else str(target)
            raise NotImplementedError(
                f"scan_layers cannot run {name} in a loop: it runs on the host only"
            )


def _draws(node: fx.Node) -> bool:
    return draws(node.target)
