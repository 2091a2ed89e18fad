"""Partitions in StableHLO: Shardy's annotations of a module's inputs, results and constraints.

    sdy.mesh @mesh = <["data"=4, "model"=2]>
    func @main(%x: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"data"}, {}]>}) -> ...

The partitioner spreads everything else as these suggest.

Inputs and results must divide evenly. Those that do not are padded on the devices: the module
slices its inputs first, and pads its results last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from lazyxla.lowering.mlir import Mlir
from lazyxla.lowering.program import AxisPart, PartitionSpec, Program, TensorSpec
from lazyxla.lowering.value import Value, unwrapped

MESH = "mesh"
"""The symbol of a module's mesh."""


class Annotations:
    """Makes the annotations of one module."""

    def __init__(self, world: Mlir, module: Any, program: Program) -> None:
        from jaxlib.mlir.dialects import sdy

        assert program.partition is not None
        self._partition = partition = program.partition
        self._world = world
        self._sdy: Any = sdy
        self._ir: Any = world.ir
        self._sizes = dict(partition.axes)
        self._batch_axes = _batch_axes(program)
        axes = [sdy.MeshAxisAttr.get(name, size) for name, size in partition.axes]
        self.mesh = sdy.MeshAttr.get(axes)
        with world.ir.InsertionPoint.at_block_begin(module.body):
            sdy.MeshOp(MESH, self.mesh)

    def constrain(self, x: Value, spec: PartitionSpec, open_: Sequence[bool]) -> Value:
        """The value with this sharding; the partitioner may split open dimensions further."""
        return Value(x.b, self._sdy.ShardingConstraintOp(x.ir, self._sharding(spec, open_)).result)

    def samples_and_heads(self, samples: int, heads: int) -> PartitionSpec | None:
        """Along which axes to split values (N, H, ...) of which every (n, h) is for itself: samples
        as what the program constrains is split, heads along all other axes. None if they do not
        divide."""
        if not self._batch_axes:
            return None
        others = [name for name in self._sizes if name not in self._batch_axes]
        spec = tuple(
            tuple((name, 1, self._sizes[name]) for name in names)
            for names in (self._batch_axes, others)
        )
        tiles = [math.prod(size for _, _, size in parts) for parts in spec]
        return None if samples % tiles[0] or heads % tiles[1] else spec

    def on_each_device(
        self,
        function: Callable[..., Sequence[Value]],
        xs: Sequence[Value],
        results: Sequence[TensorSpec],
        spec: PartitionSpec,
    ) -> list[Value]:
        """Calls a function of values once for each device, with the part of each that is its own:
        for what the partitioner cannot split.

        Args:
            function: builds the computation of a device's part of the `results` from its parts of
                `xs`.
            xs: the values.
            results: the whole results, all parts together.
            spec: how the first dimensions of all of them are split, which divide evenly.
        """
        world, ir = self._world, self._ir
        tiles = [math.prod(size for _, _, size in parts) for parts in spec]

        def part(of: TensorSpec) -> Any:
            first = [size // n for size, n in zip(of.shape, tiles)]
            return world.type(of.dtype, (*first, *of.shape[len(first) :]))

        def shardings(ranks: Sequence[int]) -> Any:
            specs = [(*spec, *[()] * (rank - len(spec))) for rank in ranks]
            return self._sdy.TensorShardingPerValueAttr.get([self._sharding(s) for s in specs])

        b, inputs = xs[0].b, [TensorSpec(x.dtype, x.shape) for x in xs]
        op = self._sdy.ManualComputationOp(
            [world.type(*result) for result in results],
            unwrapped(list(xs)),
            shardings([len(of.shape) for of in inputs]),
            shardings([len(of.shape) for of in results]),
            self._sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in self._sizes]),
        )
        block = op.regions[0].blocks.append(*(part(of) for of in inputs))
        with ir.InsertionPoint(block):
            self._sdy.ReturnOp(unwrapped(list(function(*b.wrap(block.arguments)))))
        return b.wrap(op.results)

    def padded(self, inputs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The inputs as they are on the devices."""
        specs = zip(inputs, self._partition.inputs, strict=True)
        return [TensorSpec(s.dtype, _evenly(s.shape, spec)) for s, spec in specs]

    def cut(self, values: list[Value], inputs: Sequence[TensorSpec]) -> list[Value]:
        """The inputs without their padding."""
        pairs = zip(values, inputs, strict=True)
        return [x.b.slice(x, [0] * len(shape), shape) for x, (_, shape) in pairs]

    def pad(self, results: list[Value]) -> list[Value]:
        """The results as they are to be on the devices."""
        padded = []
        for x, spec in zip(results, self._partition.results, strict=True):
            even = x.shape if spec is None else _evenly(x.shape, spec)
            more = [e - s for e, s in zip(even, x.shape, strict=True)]
            padded.append(x.b.pad(x, [0] * x.rank, more))
        return padded

    def annotate(self, function: Any, donations: dict[int, int]) -> None:
        """Gives a function its inputs' and results' shardings; every device has the numbers, which
        follow the inputs, whole."""
        partition = self._partition
        whole = [()] * (len(function.arguments) - len(partition.inputs))
        arguments = [{"sdy.sharding": self._sharding(s)} for s in partition.inputs]
        arguments += [{"sdy.sharding": self._sharding((spec,))} for spec in whole]
        i32 = self._ir.IntegerType.get_signless(32)
        for number, result in donations.items():
            arguments[number]["tf.aliasing_output"] = self._ir.IntegerAttr.get(i32, result)
        results: list[dict[str, Any]] = [
            {} if s is None else {"sdy.sharding": self._sharding(s)} for s in partition.results
        ]
        function.attributes["arg_attrs"] = self._attributes(arguments)
        function.attributes["res_attrs"] = self._attributes(results)

    def _attributes(self, dicts: list[dict[str, Any]]) -> Any:
        return self._ir.ArrayAttr.get([self._ir.DictAttr.get(each) for each in dicts])

    def _sharding(self, spec: PartitionSpec, open_: Sequence[bool] = ()) -> Any:
        dimensions = [
            self._sdy.DimensionShardingAttr.get([self._axis(part) for part in parts], not is_open)
            for parts, is_open in zip(spec, open_ or [False] * len(spec), strict=True)
        ]
        return self._sdy.TensorShardingAttr.get(MESH, dimensions)

    def _axis(self, part: AxisPart) -> Any:
        name, before, size = part
        if size == self._sizes[name]:
            return self._sdy.AxisRefAttr.get(name)
        return self._sdy.AxisRefAttr.get(name, self._sdy.SubAxisInfoAttr.get(before, size))


def _evenly(shape: Sequence[int], spec: PartitionSpec) -> tuple[int, ...]:
    """The shape, made longer where it does not divide."""
    tiles = [math.prod(size for _, _, size in parts) for parts in spec]
    return tuple(-(-size // n) * n for size, n in zip(shape, tiles, strict=True))


def constrained(x: Value, annotations: Annotations | None, text: str) -> Value:
    """`x` spread as the sharding of this text says; `x` itself in a program for one device."""
    from lazyxla import _C

    sharding = _C.find_sharding(text)
    if annotations is None or sharding is None:
        return x
    return annotations.constrain(x, sharding.spec, sharding.open)


def _batch_axes(program: Program) -> tuple[str, ...]:
    """The axes along which most of what is constrained is split in its first dimension; none if
    nothing is. What is constrained as an input of its shape is declared, as gradients are, counts
    only if there is nothing else."""
    from lazyxla import _C

    assert program.partition is not None
    specs = zip(program.inputs, program.partition.inputs, strict=True)
    declared = {(tuple(shape), spec) for (_, shape), spec in specs}
    found, like_inputs = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for node in program.nodes:
        if node.op == "lazyxla::constrain" and isinstance(node.args[1], str):
            sharding = _C.find_sharding(node.args[1])
            if sharding is not None and len(sharding.spec) > 2:
                is_like = (tuple(node.outputs[0].shape), tuple(sharding.spec)) in declared
                count = like_inputs if is_like and not any(sharding.open) else found
                count[tuple(name for name, _, _ in sharding.spec[0])] += 1
    for count in (found, like_inputs):
        count.pop((), None)
    return next((c.most_common(1)[0][0] for c in (found, like_inputs) if c), ())
