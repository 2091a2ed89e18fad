"""A loop over equal layers: one traced layer, computed for each slice of stacked tensors.

    def forward(x, weights):                 # a tensor for each layer
        w = stack(weights)
        for i in range(layers):              # one stablehlo.while
            x, kept[i] = layer(x, w[i])
        return x, kept

The loop is one node of the pending graph, as a traced graph is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.fx_graph import FxGraph, run_graph
from lazyxla.lowering.partition import constrained
from lazyxla.lowering.program import TensorSpec
from lazyxla.lowering.value import Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


CARRY, CONSTANT, LAYER, STACKED = "carry", "constant", "layer", "stacked"
"""The source of a body's input: the iteration before, one value, a value for each layer, one value
that is stacked. And the use of an output: for the next iteration, summed over all iterations, one
result for each layer, one stacked result."""

_STACKS = (LAYER, STACKED)

_STEP = 0xD1B54A32D192ED03
"""The seed's increment from layer to layer; odd, and no multiple of the step between a layer's
random operators."""


@dataclass(frozen=True)
class LayerLoop:
    """A loop as the lowering takes it; see `Graph` in registry.py.

    Attributes:
        body: of one iteration.
        length: how many iterations there are.
        reverse: from the last layer to the first.
        inputs: for each of the body's inputs, its source.
        outputs: for each of the body's outputs, its use. As many are carried as inputs are, and in
            the same order.
        input_shardings: of the stacked tensors, for inputs with a value for each layer; or None.
        output_shardings: likewise of stacked results.
        draws: whether the body draws random numbers.
        gets_stream: whether the last of the values that the loop is lowered on is the stream to
            draw from, int64[2], seed and ordinal.
        gives_stream: whether it returns its stream as its last output.
    """

    body: FxGraph
    length: int
    reverse: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_shardings: tuple[str | None, ...]
    output_shardings: tuple[str | None, ...]
    draws: bool
    gets_stream: bool
    gives_stream: bool

    @property
    def is_padded(self) -> bool:
        return False

    def lower(self, b: Builder, values: list[Any]) -> list[Value]:
        """Lowers the loop.

        Args:
            values: for each input of the body its value; for one of layers a value of each. Then
                the stream, if there is one.

        Returns:
            For each output of the body its value; for one of layers the value of each. Then the
            stream, if it is returned.
        """
        values = [b.value(v) for v in values]
        stream = self._stream(b, values)
        given = self._stacked(b, values)
        carry = [v for v, kind in zip(given, self.inputs, strict=True) if kind == CARRY]
        xs = [v for v, kind in zip(given, self.inputs, strict=True) if kind in _STACKS]
        constants = [v for v, kind in zip(given, self.inputs, strict=True) if kind == CONSTANT]
        sums = [s for s, k in zip(self._specs(), self.outputs, strict=True) if k == CONSTANT]
        slices = [s for s, k in zip(self._specs(), self.outputs, strict=True) if k in _STACKS]

        def body(
            i: Value, carried: list[Value], x: list[Value], fixed: list[Value]
        ) -> tuple[list[Value], list[Value]]:
            now, totals = carried[: len(carry)], carried[len(carry) :]
            *fixed, seed, ordinal = fixed
            sources = {CARRY: iter(now), CONSTANT: iter(fixed), LAYER: iter(x)}
            sources[STACKED] = sources[LAYER]
            with b.stream(self._seed_of(seed, i), ordinal) if self.draws else nullcontext():
                made = run_graph(b, self.body, [next(sources[kind]) for kind in self.inputs])
            made = [m.to(s.dtype) for m, s in zip(made, self._specs(), strict=True)]
            parts = list(zip(made, self.outputs, strict=True))
            following = [m for m, kind in parts if kind == CARRY]
            terms = [m for m, kind in parts if kind == CONSTANT]
            following += [t + m for t, m in zip(totals, terms, strict=True)]
            return following, [m for m, kind in parts if kind in _STACKS]

        start = [*carry, *(b.zeros(list(s.shape), s.dtype) for s in sums)]
        last, stacks = b.scan(
            self.length, body, start, xs, [*constants, *stream], slices, self.reverse
        )
        results = self._results(b, last[: len(carry)], last[len(carry) :], stacks)
        if self.gives_stream:
            results.append(b.bitcast(b.stack(stream, 0), torch.int64))
        return results

    def _specs(self) -> list[TensorSpec]:
        values = [node.meta["val"] for node in self.body.outputs]
        return [TensorSpec(v.dtype, tuple(v.shape)) for v in values]

    def _stream(self, b: Builder, values: list[Value]) -> list[Value]:
        """Seed and ordinal, uint64; takes them from the values if these have them."""
        if self.gets_stream:
            both = b.bitcast(values.pop(), torch.uint64)
            return [b.select_dim(both, 0, 0), b.select_dim(both, 0, 1)]
        return list(b.rng) if self.draws else [b.constant(0, torch.uint64)] * 2

    @staticmethod
    def _seed_of(seed: Value, i: Value) -> Value:
        return seed + (i.to(torch.uint64) + 1) * _STEP

    def _stacked(self, b: Builder, values: Sequence[Value]) -> list[Value]:
        """The values, those of layers stacked."""
        left = iter(values)
        given = []
        for kind, sharding in zip(self.inputs, self.input_shardings, strict=True):
            if kind != LAYER:
                given.append(next(left))
                continue
            whole = b.stack([next(left) for _ in range(self.length)], 0)
            given.append(whole if sharding is None else constrained(whole, b.annotations, sharding))
        return self._apart(b, given, self.inputs)

    @staticmethod
    def _apart(b: Builder, values: list[Value], kinds: Sequence[str]) -> list[Value]:
        """The values, of which stacks are computed as they are."""
        stacks = [i for i, kind in enumerate(kinds) if kind == LAYER]
        apart = dict(zip(stacks, b.stacked_apart([values[i] for i in stacks]), strict=True))
        return [apart.get(i, value) for i, value in enumerate(values)]

    def _results(
        self, b: Builder, carry: list[Value], sums: list[Value], stacks: list[Value]
    ) -> list[Value]:
        sources = {CARRY: iter(carry), CONSTANT: iter(sums), LAYER: iter(stacks)}
        sources[STACKED] = sources[LAYER]
        made = []
        for kind, sharding in zip(self.outputs, self.output_shardings, strict=True):
            value = next(sources[kind])
            made.append(value if sharding is None else constrained(value, b.annotations, sharding))
        results: list[Value] = []
        for kind, value in zip(self.outputs, self._apart(b, made, self.outputs), strict=True):
            if kind == LAYER:
                results += [b.select_dim(value, 0, i) for i in range(self.length)]
            else:
                results.append(value)
        return results
