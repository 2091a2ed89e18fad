"""Host calls: custom calls to PyTorch's own CPU kernels, of operators without an XLA form, and of
those that these kernels compute faster.

Only programs for the CPU can have them, and only where the plugin takes handlers: there the handler
in ``csrc/dispatch/host_call.cpp`` runs the operator on the program's own memory. Its header
describes how a call is written.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazyxla.lowering.errors import LoweringError, show_call
from lazyxla.lowering.operators import find_op, kernel_file, on_meta, schema_name
from lazyxla.lowering.program import TensorSpec

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder

_OPERANDS = {"Tensor", "number", "float"}
"""Schema types of arguments that become operands."""
_VALUES = {"int", "SymInt", "bool", "ScalarType"}
"""... and of those that are written into the program, as lists too."""

_available: Callable[[], bool] | None = None
_forbidden: Callable[[], bool] | None = None


def allow_host_calls(available: Callable[[], bool], forbidden: Callable[[], bool]) -> None:
    """Allows host calls where `available` says that the plugin takes our handler.

    Where `forbidden` says that the user wants none, a lowering that needs one is an error.
    """
    global _available, _forbidden
    _available, _forbidden = available, forbidden


def possible(name: str) -> bool:
    """Whether an operator can be called on the host from within a program, here and now."""
    return _fits(name) and available()


def available() -> bool:
    """Whether programs can call the host, here and now."""
    return _available is not None and _available()


@functools.lru_cache(maxsize=4096)
def _fits(name: str) -> bool:
    """Whether the operator is one for which that is right: a function from tensors to tensors whose
    shapes do not depend on data, with a compiled CPU kernel.

    A random operator would not draw from the device's generator. A kernel in Python needs the GIL,
    which the thread that waits for the program may hold.
    """
    op = find_op(name)
    if op is None or not _is_pure(op):
        return False
    if "quantize" in name and "fake_quantize" not in name:  # schemas do not show quantized tensors
        return False
    tags = (
        torch.Tag.dynamic_output_shape,
        torch.Tag.data_dependent_output,
        torch.Tag.nondeterministic_seeded,
    )
    if any(tag in op.tags for tag in tags):
        return False
    kernel = kernel_file(name, "CPU")
    asked = schema_name(on_meta(op))
    has_shape = torch._C._dispatch_has_computed_kernel_for_dispatch_key(asked, "Meta")
    return has_shape and bool(kernel) and not kernel.endswith(".py")


def _is_pure(op: Any) -> bool:
    schema = op._schema
    returns = [str(r.real_type) for r in schema.returns]
    return (
        not schema.is_mutable
        and all(r.alias_info is None for r in schema.returns)
        and bool(returns)
        and all(kind in ("Tensor", "List[Tensor]") for kind in returns)
        and all(_is_known(str(a.real_type)) for a in schema.arguments)
    )


def _is_known(kind: str) -> bool:
    """Whether arguments of a schema type can be passed to the handler."""
    bare = _without(kind, "Optional")
    element = _without(bare, "List")
    if element == bare:
        return bare in _OPERANDS | _VALUES | {"str"}
    return _without(element, "Optional") in _OPERANDS or element in _VALUES - {"ScalarType"}


def _without(kind: str, wrapper: str) -> str:
    inner = re.fullmatch(rf"{wrapper}\[(.*)\]", kind)
    return inner[1] if inner else kind


def host_call(b: Builder, name: str, args: tuple[Any, ...]) -> list[Any]:
    """Emits the call of an operator that has no other lowering, where the user allows that.

    `args` are all its arguments, as the rules take them.
    """
    if _forbidden is not None and _forbidden() and not b.trying:
        raise LoweringError(
            f"{show_call(name, args)} would run on the host, called by the program; strict mode "
            "(LAZYXLA_STRICT_HOST_CALLS) makes this an error"
        )
    b.host_calls.append(name)
    return emit_call(b, name, args, b.outputs)


def may_call_kernel(b: Builder) -> bool:
    """Whether this program can call kernels. The compiler can neither split a call nor make it fit
    other sizes."""
    fixed = b.annotations is None and not b.target.any_sizes
    return fixed and b.takes_host_calls and available()


def call_kernel(
    b: Builder,
    name: str,
    args: tuple[Any, ...],
    outputs: Sequence[TensorSpec],
    split: Sequence[int],
    divided: str | None = None,
    transposed: Sequence[int] = (),
    in_place: bool = False,
) -> list[Any]:
    """Emits the call of an operator's kernel where that is faster than what XLA makes of it.

    The plugin's threads share the work: `split` names the dimension of each operand, then of each
    result, that is cut, -1 for what each part needs as a whole. If none is cut, one thread does
    all. `divided` is an integer argument of which each part gets its share. The kernel takes the
    operands that `transposed` numbers, which are matrices, as their transposes. A kernel that works
    `in_place` writes to its first operand, whose memory is the result's.
    """
    ir = b.mlir.ir
    options = {"split": ir.DenseI64ArrayAttr.get(list(split))}
    if divided is not None:
        options["divided"] = ir.StringAttr.get(divided)
    if transposed:
        options["transposed"] = ir.DenseI64ArrayAttr.get(list(transposed))
    return emit_call(b, name, args, outputs, options, in_place)


def emit_call(
    b: Builder,
    name: str,
    args: tuple[Any, ...],
    outputs: Sequence[TensorSpec],
    options: Mapping[str, Any] = {},
    in_place: bool = False,
) -> list[Any]:
    """Emits the call of operator `name`; see `call_kernel` for `in_place`."""
    op: Any = find_op(name)
    ir = b.mlir.ir
    i64 = b.mlir.element(torch.int64)
    operands: list[Any] = []

    def operand(arg: Any) -> int:
        if arg is None:
            return -1
        operands.append(b.value(arg))
        return len(operands) - 1

    def encode(arg: Any, by_operand: bool) -> Any:
        if isinstance(arg, (list, tuple)):
            return ir.DenseI64ArrayAttr.get([operand(a) if by_operand else int(a) for a in arg])
        if by_operand:
            return ir.IntegerAttr.get(i64, operand(arg))
        if isinstance(arg, bool):
            return ir.BoolAttr.get(arg)
        if isinstance(arg, int):
            return ir.IntegerAttr.get(i64, arg)
        return ir.StringAttr.get(str(arg).removeprefix("torch."))

    arguments = {}
    for argument, arg in zip(op._schema.arguments, args, strict=True):
        if arg is not None:
            arguments[argument.name] = encode(arg, _takes_operands(argument))
    config = {
        "operator": ir.StringAttr.get(name),
        "arguments": ir.DictAttr.get(arguments),
        **options,
    }
    aliases = [b.hlo.OutputOperandAlias.get([], 0, [])] if in_place else []
    call = b.hlo.CustomCallOp(
        [b.type(s.dtype, tuple(s.shape)) for s in outputs],
        operands,
        call_target_name="lazyxla.host_call",
        has_side_effect=False,
        backend_config=ir.DictAttr.get(config),
        api_version=ir.IntegerAttr.get(b.mlir.element(torch.int32), 4),
        operand_layouts=_row_major(b, [len(b.shape(x)) for x in operands]),
        result_layouts=_row_major(b, [len(s.shape) for s in outputs]),
        output_operand_aliases=ir.ArrayAttr.get(aliases),
    )
    return b.wrap(call.results)


def operands_of(name: str, args: Sequence[Any]) -> list[Any]:
    """Those of an operator's arguments, none of them lists, that become operands of its call."""
    op: Any = find_op(name)
    pairs = zip(op._schema.arguments, args, strict=True)
    return [arg for argument, arg in pairs if arg is not None and _takes_operands(argument)]


def _takes_operands(argument: torch.Argument) -> bool:
    kind = str(argument.real_type)
    return any(re.search(rf"\b{k}\b", kind) for k in _OPERANDS)


def _row_major(b: Builder, ranks: list[int]) -> Any:
    ir = b.mlir.ir
    index = ir.IndexType.get()

    def layout(rank: int) -> Any:
        import numpy as np

        minor_to_major = np.arange(rank - 1, -1, -1, dtype=np.int64)
        return ir.DenseIntElementsAttr.get(minor_to_major, type=index)

    return ir.ArrayAttr.get([layout(rank) for rank in ranks])
