"""Host programs: a small program as calls of PyTorch's CPU kernels, in place of XLA's compiler.

XLA takes 10 ms and more for one operator. Where the device is the host, PyTorch's kernels compute
the same within microseconds, on the program's own memory. So small programs that would be new again
and again (a `cat` that grows) are run by them. `prepare` makes such a program, or finds that it
must be compiled: because of an operator that XLA defines otherwise (indices out of range, integers
divided by zero, floating-point numbers beyond an integer's range), of a random one, whose numbers
come from the device's generator, or of one with a rule of the user's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazyxla.lowering import registry
from lazyxla.lowering.decompose import find_op
from lazyxla.lowering.geometry import offset_of
from lazyxla.lowering.program import Geometry, Node, Program, Ref, Settings, Slot, TensorSpec

Number = int | float | bool
Run = Callable[[list[torch.Tensor], list[Number]], list[torch.Tensor]]
"""From the inputs, dense tensors on the CPU that it does not write, and the slots' values."""
Resolve = Callable[[Any], Any]
"""From an argument as the node has it to its value."""
Step = Callable[[Resolve], Any]
"""Computes a node's output, or a list of them."""

_EXCLUDED_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)
_INDICES = {"index", "indices", "target", "offsets", "repeats"}
"""Names of arguments whose values must be in a range, which XLA does not check."""
_CASTS = {"aten::_to_copy", "lazyxla::cast"}
_DIVISIONS = {"div", "floor_divide", "remainder", "fmod", "gcd", "lcm", "pow", "float_power"}


class _MustBeCompiled(Exception):
    pass


def prepare(program: Program) -> Run | None:
    """The program as a function; None if it must be compiled."""
    specs = [*program.inputs, *(spec for node in program.nodes for spec in node.outputs)]
    try:
        run = _Run(program, [_step(node, program, specs) for node in program.nodes])
        inputs = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in program.inputs]
        results = run(inputs, [])
    except (_MustBeCompiled, RuntimeError, TypeError, ValueError, IndexError):
        return None  # it cannot be called like this: the compiler tells what is wrong, if anything
    wanted = [specs[ref] for ref in program.outputs]
    found = [TensorSpec(r.dtype, tuple(r.shape)) for r in results]
    return run if found == wanted else None


class _Run:
    """Runs steps one after the other."""

    def __init__(self, program: Program, steps: list[Step]) -> None:
        self._steps = steps
        self._outputs = [int(ref) for ref in program.outputs]
        self._slots = program.slots

    @torch.no_grad()
    def __call__(self, inputs: list[torch.Tensor], numbers: Sequence[Number]) -> list[torch.Tensor]:
        values = list(inputs)

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return values[argument]
            if isinstance(argument, Slot):
                slot = self._slots[argument]
                # Numbers that are part of their operator stand behind those of the program.
                number = numbers[argument] if argument < len(numbers) else slot.value
                return number if slot.wrapped else torch.tensor(number, dtype=slot.dtype)
            if isinstance(argument, list):
                return [resolve(a) for a in argument]
            return argument

        for step in self._steps:
            result = step(resolve)
            values += result if isinstance(result, (list, tuple)) else [result]
        return [values[output] for output in self._outputs]


def _step(node: Node, program: Program, specs: list[TensorSpec]) -> Step:
    as_now = node.settings in (None, Settings.current())
    if node.rng is not None or not as_now or _is_defined_otherwise(node, specs):
        raise _MustBeCompiled
    if own := _OWN.get(node.op):
        return lambda resolve: own(node, *map(resolve, node.args))
    op = find_op(node.op)
    if not node.op.startswith("aten::") or op is None or not _may_call(node.op, op):
        raise _MustBeCompiled
    call = op
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument, value in zip(op._schema.arguments, node.args, strict=True):
        kind = str(argument.real_type)
        if isinstance(value, torch.device):
            value = torch.device("cpu")
        elif value is None and kind == "Tensor":  # only its shape and dtype matter
            value = torch.zeros(node.outputs[0].shape, dtype=node.outputs[0].dtype)
        takes_number = kind in ("Tensor", "Optional[Tensor]")
        if takes_number and isinstance(value, Slot) and program.slots[value].wrapped:
            call = op._overloadpacket  # which has an overload for a number
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)

    def step(resolve: Resolve) -> Any:
        named = {name: resolve(value) for name, value in keywords.items()}
        return call(*map(resolve, positional), **named)

    return step


def _is_defined_otherwise(node: Node, specs: list[TensorSpec]) -> bool:
    """Whether some values are another result, or an error, in PyTorch's kernels."""
    if any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in node.outputs):
        return False
    if node.op in _CASTS:
        source, (output,) = specs[node.args[0]], node.outputs
        return source.dtype.is_floating_point and output.dtype is not torch.bool
    return node.op.removeprefix("aten::").partition(".")[0] in _DIVISIONS


@functools.lru_cache(maxsize=4096)
def _may_call(name: str, op: Any) -> bool:
    schema = op._schema
    return (
        not schema.is_mutable
        and all(str(r.real_type) in ("Tensor", "List[Tensor]") for r in schema.returns)
        and not any(tag in op.tags for tag in _EXCLUDED_TAGS)
        and not any(argument.name in _INDICES for argument in schema.arguments)
        and (registry.has_own_rule(name) or not registry.has_user_rules())
    )


registry.on_change(lambda _: _may_call.cache_clear())


# ---- the recorder's internal operators ----


def _memory(x: torch.Tensor, base: Geometry) -> torch.Tensor:
    """A copy of a storage's content, as it lies in memory."""
    flat = torch.empty(math.prod(base.sizes), dtype=base.dtype)
    flat.as_strided(base.sizes, base.strides).copy_(x)
    return flat


def _through(
    memory: torch.Tensor, base: Geometry, view: Geometry, *begin: Sequence[int]
) -> torch.Tensor:
    """The view of memory."""
    offset = offset_of(base, view, *begin)
    return memory.view(view.dtype).as_strided(view.sizes, view.strides, offset)


def _view(node: Node, x: torch.Tensor, base: Geometry, *where: Any) -> torch.Tensor:
    return _through(_memory(x, base), base, *where)


def _view_scatter(
    node: Node, x: torch.Tensor, update: torch.Tensor, base: Geometry, *where: Any
) -> torch.Tensor:
    memory = _memory(x, base)
    _through(memory, base, *where).copy_(update)
    return memory.as_strided(base.sizes, base.strides)


def _cast(node: Node, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def _constant(node: Node, number: Any) -> torch.Tensor:
    (output,) = node.outputs
    return torch.full(output.shape, number, dtype=output.dtype)


def _undefined(node: Node) -> torch.Tensor:
    (output,) = node.outputs
    return torch.zeros(output.shape, dtype=output.dtype)


_OWN: dict[str, Callable[..., torch.Tensor]] = {
    "lazyxla::view": _view,
    "lazyxla::view_scatter": _view_scatter,
    "lazyxla::cast": _cast,
    "lazyxla::constant": _constant,
    "lazyxla::undefined": _undefined,
}
