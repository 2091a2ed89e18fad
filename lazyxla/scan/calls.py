"""The two loops of a scan as recorded operators, and autograd's function around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lazyxla import _C
from lazyxla.dynamo.execution import next_number
from lazyxla.lowering import registry
from lazyxla.lowering.fx_graph import FxGraph
from lazyxla.lowering.loops import CARRY, CONSTANT, LAYER, STACKED, LayerLoop
from lazyxla.lowering.operators import draws
from lazyxla.scan.tracing import Joint, Policy

Meta = tuple[torch.dtype, list[int], list[int]]


class Plan:
    """A traced layer as loops over a number of layers.

    Arguments of a call are, in this order: for each of a layer's tensors all layers' ones, the
    carry's leaves, the constants.
    """

    def __init__(
        self, joint: Joint, length: int, policy: Policy, shardings: Sequence[str | None]
    ) -> None:
        what = joint.signature
        self.length, self.carry = length, what.carry
        self.differentiable = any(g is not None for g in joint.gradients)
        self._kinds = [LAYER] * what.layer + [CARRY] * what.carry
        self._kinds += [CONSTANT] * (len(what.specs) - len(self._kinds))
        self._shardings = [*shardings, *[None] * (len(what.specs) - what.layer)]
        self._places = self._argument_places()
        self.differentiable_carry = [i for i, t in enumerate(joint.tangents) if t is not None]
        self.residuals = joint.residuals(policy) if self.differentiable else []
        self.written = [self._places[i] for i, n in enumerate(joint.written) if n is not None]
        self._joint = joint
        self._gets = joint.fixed()
        self._backward: Any = None
        self._forward, self.draws = self._make_forward()

    @property
    def saved(self) -> list[int]:
        """The arguments that the backward needs as they are."""
        return [place for i in self._gets for place in self._places[i]]

    def call(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """:meth:`forward`, with gradients."""
        return Scan.apply(self, *arguments)  # type: ignore[no-any-return, no-untyped-call]

    def forward(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Records the forward loop. Returns the last carry, the residuals, and the stream if random
        numbers were drawn."""
        return self._forward(list(arguments))  # type: ignore[no-any-return]

    def backward(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Records the backward loop, given the saved arguments, the residuals, the gradients of the
        last carry, and the stream if there is one. Returns a gradient for each argument."""
        if self._backward is None:
            self._backward = self._make_backward()
        made = iter(self._backward(list(operands)))
        return [
            next(made) if gradient is not None else None
            for gradient, places in zip(self._joint.gradients, self._places, strict=True)
            for _ in places
        ]

    def tangents(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The gradients of the last carry, as the backward takes them; None stands for zeros."""
        chosen = []
        for i in self.differentiable_carry:
            gradient, value = gradients[i], self._joint.results[i].meta["val"]
            if gradient is None:
                device = self._joint.signature.device
                gradient = torch.zeros(value.shape, dtype=value.dtype, device=device)
            chosen.append(gradient)
        return chosen

    def _argument_places(self) -> list[list[int]]:
        """For each of a layer's inputs the arguments that are its source."""
        places, begin = [], 0
        for kind in self._kinds:
            count = self.length if kind == LAYER else 1
            places.append(list(range(begin, begin + count)))
            begin += count
        return places

    def _make_forward(self) -> tuple[Any, bool]:
        joint = self._joint
        body = joint.forward(self.residuals)
        written = [i for i, n in enumerate(joint.written) if n is not None]
        for i in written:
            if self._kinds[i] != LAYER:
                raise NotImplementedError("scan_layers: a layer must not write to its arguments")
        outputs = [CARRY] * self.carry + [LAYER] * len(written) + [STACKED] * len(self.residuals)
        shardings = [None] * self.carry + [self._shardings[i] for i in written]
        shardings += [None] * len(self.residuals)
        loop = self._loop(body, False, self._kinds, self._shardings, outputs, shardings)
        writes = [
            (place, self.carry + position * self.length + number)
            for position, i in enumerate(written)
            for number, place in enumerate(self._places[i])
        ]
        return self._call(loop, writes), loop.draws

    def _make_backward(self) -> Any:
        joint = self._joint
        body = joint.backward(self.residuals)
        kinds = [self._kinds[i] for i in self._gets]
        kinds += [STACKED] * len(self.residuals)
        tangents = len(body.inputs) - len(kinds)
        shardings = [self._shardings[i] for i in self._gets]
        shardings += [None] * (len(self.residuals) + tangents)
        kinds += [CARRY] * tangents
        known = [i for i, g in enumerate(joint.gradients) if g is not None]
        outputs = [self._kinds[i] for i in known]
        return self._call(
            self._loop(body, True, kinds, shardings, outputs, [self._shardings[i] for i in known]),
            [],
        )

    def _loop(
        self,
        body: FxGraph,
        reverse: bool,
        kinds: Sequence[str],
        shardings: Sequence[str | None],
        outputs: Sequence[str],
        output_shardings: Sequence[str | None],
    ) -> LayerLoop:
        random = any(draws(n.target) for n in body.nodes)
        return LayerLoop(
            body,
            self.length,
            reverse,
            tuple(kinds),
            tuple(outputs),
            tuple(shardings),
            tuple(output_shardings),
            draws=random,
            gets_stream=reverse and self.draws,
            gives_stream=random and not reverse,
        )

    def _call(self, loop: LayerLoop, writes: list[tuple[int, int]]) -> Any:
        """The loop as a function of a list of tensors, which it empties."""
        inputs = sum(self.length if kind == LAYER else 1 for kind in loop.inputs)
        inputs += loop.gets_stream
        metas: list[Meta] = []
        for node, kind in zip(loop.body.outputs, loop.outputs, strict=True):
            metas += self._metas(node, kind)
        if loop.gives_stream:
            metas.append((torch.int64, [2], [1]))
        rewritten = {output for _, output in writes}
        returned = [i for i in range(len(metas)) if i not in rewritten]
        number = next_number()
        call = _C.traced_call(
            number=number,
            content="",
            operators=len(loop.body.nodes),
            device=self._joint.signature.device.index or 0,
            inputs=[(position, None, False) for position in range(inputs)],
            outputs=metas,
            results=[(metas[i], 0, i, -1) for i in returned],
            writes=writes,
            returns=[("result", position) for position in range(len(returned))],
            constants=[],
            random=loop.draws and not loop.gets_stream,
            options={},
        )
        registry.graphs[number] = loop
        return call

    def _metas(self, node: fx.Node, kind: str) -> list[Meta]:
        """Of the results that an output becomes."""
        value = node.meta["val"]
        shape = [self.length, *value.shape] if kind == STACKED else list(value.shape)
        strides = list(torch.empty(shape, device="meta").stride())
        return [(value.dtype, shape, strides)] * (self.length if kind == LAYER else 1)


class Scan(torch.autograd.Function):
    """(plan, *arguments) -> the last carry, and what the backward needs besides."""

    @staticmethod
    def forward(plan: Plan, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(plan.forward(arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        plan, *arguments = inputs
        ctx.plan = plan
        ctx.set_materialize_grads(False)  # the residuals have no gradients
        kept = output[plan.carry :]
        without = [x for x in output if not (x.is_floating_point() or x.is_complex())]
        ctx.mark_non_differentiable(*kept, *without)
        if plan.differentiable:
            ctx.save_for_backward(*(arguments[i] for i in plan.saved), *kept)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        plan = ctx.plan
        if not plan.differentiable:
            return (None,) * len(ctx.needs_input_grad)
        operands = list(ctx.saved_tensors)
        stream = [operands.pop()] if plan.draws else []
        operands += plan.tangents(gradients[: plan.carry])
        return None, *ScanGradient.apply(plan, *operands, *stream)  # type: ignore[no-untyped-call]


class ScanGradient(torch.autograd.Function):
    """(plan, *operands) -> the gradients of the arguments of a `Scan`.

    A function of its own, so that torch.func's transforms unwrap its operands.
    """

    @staticmethod
    def forward(plan: Plan, *operands: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return tuple(plan.backward(operands))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        raise NotImplementedError(
            "scan_layers has no second derivative; call the layers one by one for it"
        )
