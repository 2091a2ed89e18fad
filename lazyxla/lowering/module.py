"""From a Program to a StableHLO portable artifact."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.apply import apply, user_line
from lazyxla.lowering.builder import Builder
from lazyxla.lowering.errors import LoweringError
from lazyxla.lowering.mlir import Mlir, entered
from lazyxla.lowering.partition import Annotations
from lazyxla.lowering.platform_builders import make_builder
from lazyxla.lowering.program import Lowered, Node, Program, Ref, Slot, Target
from lazyxla.lowering.scalar import SlotTable
from lazyxla.lowering.value import unwrapped

if TYPE_CHECKING:
    from lazyxla.lowering.fx_graph import FxGraph


def lower(program: Program, target: Target, *, verify: bool = False) -> Lowered:
    """See `lazyxla.lowering.lower`."""
    with entered() as world:
        b = build(world, program, target)
        if verify:
            check(b.module)
        artifact = serialize(world, b.module, target.stablehlo_version)
    return Lowered(artifact, tuple(sorted(b.slots.static)))


def lower_to_text(program: Program, target: Target) -> str:
    """See `lazyxla.lowering.lower_to_text`."""
    with entered() as world:
        return str(build(world, program, target).module)


def check_lowering(program: Program, target: Target) -> str:
    """See `lazyxla.lowering.check_lowering`."""
    with entered() as world:
        try:
            b = build(world, program, target, trying=True)
            check(b.module)
        except LoweringError:
            return "host"
    return "call" if b.host_calls else "device"


def lower_graph(graph: FxGraph, target: Target, random: bool) -> bytes:
    """See `lazyxla.lowering.lower_graph`."""
    with entered() as world:
        b = make_builder(world, target, SlotTable([]), apply)
        examples = [node.meta["val"] for node in graph.inputs]
        specs = [(torch.uint32, (2,))] if random else []
        specs += [(x.dtype, tuple(x.shape)) for x in examples]

        def results(values: list[Any]) -> list[Any]:
            if not random:
                return graph.lower(b, values)
            seed = b.hlo.bitcast_convert(b.type(torch.uint64, []), values[0])
            with b.stream(seed, b.constant(0, torch.uint64)):
                return graph.lower(b, values[1:])

        b.function("main", [world.type(*spec) for spec in specs], results, "public")
        check(b.module)
        stream = io.BytesIO()
        b.module.operation.write_bytecode(stream)
        return stream.getvalue()


def build(world: Mlir, program: Program, target: Target, *, trying: bool = False) -> Builder:
    """The program's module, with a function `main`; the context and a location must be entered.

    A rule may make a slot static that is variable by now (it reads the number only if it is not 1,
    say). The module is then built once more without that slot among the runtime inputs.
    """
    late: set[int] = set()
    while True:
        specs = [
            spec._replace(variable=spec.variable and number not in late)
            for number, spec in enumerate(program.slots)
        ]
        slots = SlotTable(specs)
        b = make_builder(world, target, slots, apply, trying=trying)
        _build(b, program)
        found = {number for number in slots.static if specs[number].variable}
        if not found:
            slots.static |= late
            return b
        late |= found


def _build(b: Builder, program: Program) -> None:
    ir = b.mlir.ir
    b.groups = program.groups
    if program.partition is not None:
        b.annotations = Annotations(b.mlir, b.module, program)
        main = _build_function(b, "main", program)
        b.finish()
        b.annotations.annotate(main, program.donations)
        return
    flat = b.in_fewer_dimensions(program)
    if flat is None:
        main = _build_function(b, "main", program)
    else:
        main = _around(b, _build_function(b, "flat", flat, visibility="private"), program)
    b.finish()
    if program.donations:
        i32 = b.mlir.element(torch.int32)
        empty = ir.DictAttr.get({})
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [
                ir.DictAttr.get(
                    {"tf.aliasing_output": ir.IntegerAttr.get(i32, program.donations[number])}
                )
                if number in program.donations
                else empty
                for number in range(len(main.arguments))
            ]
        )


def _build_function(b: Builder, name: str, program: Program, visibility: str = "public") -> Any:
    """A function of the program's inputs, and of the runtime buffers behind them."""
    world = b.mlir
    spread = b.annotations
    inputs = program.inputs if spread is None else spread.padded(program.inputs)
    types = [world.type(s.dtype, tuple(s.shape)) for s in inputs]
    buffers = [(torch.float64, b.slots.floats), (torch.int64, b.slots.ints)]
    buffers = [(dtype, members) for dtype, members in buffers if members]
    types += [world.type(dtype, (len(members),)) for dtype, members in buffers]

    def results(values: list[Any]) -> list[Any]:
        for (dtype, _), argument in zip(buffers, values[len(program.inputs) :], strict=True):
            b.buffers[dtype] = argument
        del values[len(program.inputs) :]
        if spread is not None:
            values = spread.cut(values, program.inputs)
        for position, node in enumerate(program.nodes):
            try:
                lower_node(b, node, values)
            except LoweringError as error:
                error.node = position
                raise
        found = [values[ref] for ref in program.outputs]
        return found if spread is None else spread.pad(found)

    return b.function(name, types, results, visibility)


def _around(b: Builder, function: Any, program: Program) -> Any:
    """A function `main` for a program that `function` computes in other shapes."""
    world, ir = b.mlir, b.mlir.ir
    values = [*program.inputs, *(spec for node in program.nodes for spec in node.outputs)]
    taken = list(function.type.inputs)
    given = [world.type(s.dtype, tuple(s.shape)) for s in program.inputs]
    given += taken[len(given) :]
    wanted = [world.type(values[ref].dtype, tuple(values[ref].shape)) for ref in program.outputs]
    with ir.InsertionPoint(b.module.body):
        main = world.func.FuncOp("main", (given, wanted), visibility="public")
        block = main.add_entry_block()
    with ir.InsertionPoint(block):
        args = [b.hlo.reshape(t, x) for t, x in zip(taken, b.wrap(block.arguments), strict=True)]
        # Inlined, its loops would be over the shape of the reshaped result.
        results = zip(wanted, b.call(function, args, inlined=False), strict=True)
        world.func.ReturnOp(unwrapped([b.hlo.reshape(t, x) for t, x in results]))
    return main


def lower_node(b: Builder, node: Node, values: list[Any]) -> None:
    """Lowers one node and appends its results to `values`."""
    scalars = b.slots.scalars

    def bind(arg: Any) -> Any:
        kind = type(arg)
        if kind is Ref:
            return values[arg]
        if kind is Slot:
            return scalars[arg]
        if kind is list:
            return [bind(a) for a in arg]
        return arg

    rng = None if node.rng is None else (scalars[node.rng[0]], scalars[node.rng[1]])
    b.enter_node(node.outputs, rng)
    if node.settings is not None:
        b.settings = node.settings
    with b.mlir.location(node.op):
        values.extend(b.apply(node.op, tuple(bind(a) for a in node.args)))


def check(module: Any) -> None:
    """Runs MLIR's verifier."""
    from jaxlib.mlir import ir

    try:
        module.operation.verify()
    except ir.MLIRError as error:
        raise LoweringError(f"{_not_valid(error)}\n{module}") from error


def _not_valid(error: Exception) -> LoweringError:
    """The verifier's message; it contains an operation's location, which is the operator's name."""
    text = f"the module is not valid: {error}"
    operator = re.search(r'"(\w+::[\w.]+)"', str(error))
    return LoweringError(text + user_line(operator[1], error) if operator else text)


def serialize(world: Mlir, module: Any, version: str | None) -> bytes:
    """The module as a portable artifact for a plugin that knows StableHLO up to `version`."""
    target = world.hlo.get_current_version()
    if version is not None:
        target = world.hlo.get_smaller_version(target, version)
    pipeline = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
    try:
        world.passmanager.PassManager.parse(pipeline).run(module.operation)
    except world.ir.MLIRError as error:
        raise _not_valid(error) from error
    # Operations that the pass leaves (top-k) remain in their own dialect, as in JAX.
    artifact: bytes = world.hlo.serialize_portable_artifact(module, target, True)
    return artifact
