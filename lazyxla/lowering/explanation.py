"""Explains how an operator runs, and where the code for it is."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazyxla.lowering import host_call, lookup, registry
from lazyxla.lowering.operators import find_decomposition, find_op, kernel_file, schema_name
from lazyxla.lowering.program import Target
from lazyxla.lowering.samples import Sample, sample, samples

HOW = {
    "rule": "lowered by a rule",
    "JAX rule": "lowered by a JAX rule",
    "kernel": "the backend's own kernel",
    "composite": "a kernel for all devices, whose operators are recorded one by one",
    "decomposition": "lowered by a decomposition",
    "host call": "the CPU's kernel, called within the program",
    "host": "the CPU's kernel, between two programs",
    "reads data": "the CPU's kernel, since the shape or value of its result depends on data, or "
    "since it only looks at them",
    "overloads": "an operator with overloads",
}
"""The ways in which an operator can run, and what each means."""

_RECORDED_IN = ("registration.cpp", "factorizations.cpp")
"""The files in csrc/dispatch whose kernels record the operator that they are registered for."""

_DEEPEST = 3
"""How many levels of nested decompositions are shown."""


@dataclass(frozen=True)
class Explanation:
    """How an operator runs on a platform. ``str()`` gives it as text, a line for each operator.

    Attributes:
        operator: the name, with the overload: "aten::add.Tensor".
        platform: "cpu", "cuda" or "tpu".
        how: one of the keys of ``HOW``.
        where: file, line and name of the function that lowers it, if it is in Python.
        functional: of an operator that writes to its arguments, the functional one it is recorded
            as, which all else is about.
        parts: of a decomposition, a composite kernel or overloads: the operators it consists of.
            What a decomposition calls can depend on the arguments; these are those of a small call.
        dtypes: of a decomposition that runs in other ways for some dtypes: how it runs for each.
    """

    operator: str
    platform: str
    how: str
    where: str = ""
    functional: str = ""
    parts: tuple[Explanation, ...] = ()
    dtypes: dict[torch.dtype, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.operator} on {self.platform}: {self._line()}"]
        for part in self.parts:
            lines.append(f"    {part.operator}: {part._line()}")
        for way in dict.fromkeys(self.dtypes.values()):
            names = [str(d).removeprefix("torch.") for d, w in self.dtypes.items() if w == way]
            lines.append(f"    {', '.join(names)}: {HOW[way]}")
        return "\n".join(lines)

    def _line(self) -> str:
        text = HOW[self.how] + (f" ({self.where})" if self.where else "")
        return f"writes what {self.functional} yields, {text}" if self.functional else text


def explain(operator: Any, platform: str | None = None) -> Explanation:
    """Explains how an operator runs.

    Args:
        operator: a name such as "aten::add.Tensor" or "mylib::myop", without overload for the
            default one or, if there is none, for all; or an operator of ``torch.ops``.
        platform: "cpu", "cuda" or "tpu"; the current one if left out.

    Raises:
        ValueError: there is no such operator (the message has near names), or no such platform.
    """
    if platform is None:
        from lazyxla.runtime import platform as current

        platform = current()
    if platform not in ("cpu", "cuda", "tpu"):
        raise ValueError(f"platform is cpu, cuda or tpu, got {platform!r}")
    name = operator if isinstance(operator, str) else _name_of(operator)
    if _exists(name):
        return _explain(name, platform, 0)
    overloads = _overloads(name)
    if not overloads:
        raise ValueError(f"there is no operator {name!r}{_near(name)}")
    parts = tuple(_explain(n, platform, 0) for n in overloads)
    return Explanation(name, platform, "overloads", parts=parts)


def _name_of(op: Any) -> str:
    if isinstance(op, torch._ops.OpOverload):
        return schema_name(op)
    if isinstance(op, torch._ops.OpOverloadPacket):
        return str(op._qualified_op_name)
    raise TypeError(f"an operator is a name or one of torch.ops, got {type(op).__name__}")


def _overloads(name: str) -> list[str]:
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None) if base else None
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    names = [name if o == "default" else f"{name}.{o}" for o in overloads]
    return [n for n in names if _exists(n)]


def _exists(name: str) -> bool:
    # torch.ops has TorchScript's operators, too, which no backend sees.
    return find_op(name) is not None and bool(torch._C._dispatch_has_kernel(name))


def _near(name: str) -> str:
    base, dot, _ = name.partition(".")
    if dot and (found := _overloads(base)):
        return f"; there is {', '.join(found)}"
    known = torch._C._dispatch_get_all_op_names()
    bases = dict.fromkeys(k.partition(".")[0] for k in known)
    near = difflib.get_close_matches(base, bases, n=3) or difflib.get_close_matches(
        f"aten::{base.rpartition('::')[2]}", bases, n=3
    )
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _explain(name: str, platform: str, depth: int) -> Explanation:
    op: Any = find_op(name)
    if op._schema.is_mutable:
        return _explain_writing(name, op, platform, depth)
    if (rule := registry.find_rule(name, platform)) is not None and lookup.how(name) == "rule":
        return Explanation(name, platform, "rule", where=_where(rule))
    if (jax_rule := registry.find_jax_rule(name, platform)) is not None:
        return Explanation(name, platform, "JAX rule", where=_where(jax_rule.function))
    if kernel := own_kernel(name):
        return Explanation(name, platform, "kernel", where=kernel)
    if (composite := _composite_kernel(name)) is not None:
        parts = _parts(op, op.decompose, platform, depth) if composite == "implicit" else ()
        return Explanation(name, platform, "composite", parts=parts)
    if (function := find_decomposition(name)) is not None:
        return _explain_decomposition(name, op, function, platform, depth)
    return Explanation(name, platform, _without_lowering(op, name, platform))


def _explain_writing(name: str, op: Any, platform: str, depth: int) -> Explanation:
    from lazyxla import _C

    if kernel := own_kernel(name):
        return Explanation(name, platform, "kernel", where=kernel)
    functional = _C.functional_name(name)
    if not functional:
        how = "host" if _composite_kernel(name) is None else "composite"
        return Explanation(name, platform, how)
    found = _explain(functional, platform, depth)
    return Explanation(
        name, platform, found.how, found.where, functional, found.parts, found.dtypes
    )


def _explain_decomposition(
    name: str, op: Any, function: Callable[..., Any], platform: str, depth: int
) -> Explanation:
    from lazyxla.lowering.module import check_lowering  # it loads jaxlib's MLIR

    ways: dict[torch.dtype, str] = {}
    otherwise = _without_lowering(op, name, platform)
    for dtype, found in samples(op):
        if not _decomposes(function, found):
            continue  # the sample does not show the parts
        way = check_lowering(found.program(), Target(platform))
        ways[dtype] = otherwise if way == "host" else "decomposition"
    return Explanation(
        name,
        platform,
        "decomposition" if "decomposition" in ways.values() or not ways else otherwise,
        where=_where(function),
        parts=_parts(op, function, platform, depth),
        dtypes=ways if len(set(ways.values())) > 1 else {},
    )


def _decomposes(function: Callable[..., Any], call: Sample) -> bool:
    try:
        function(*call.args, **call.kwargs)
    except Exception:  # a refusal may be any exception
        return False
    return True


def _without_lowering(op: Any, name: str, platform: str) -> str:
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    schema = op._schema
    only_looks = not schema.returns and not schema.is_mutable and name.startswith("aten::")
    if only_looks or any(tag in op.tags for tag in tags):
        return "reads data"
    return "host call" if platform == "cpu" and host_call.possible(name) else "host"


def _parts(
    op: Any, function: Callable[..., Any], platform: str, depth: int
) -> tuple[Explanation, ...]:
    """The operators that a decomposition calls, found by a small float32 call."""
    call = sample(op, torch.float32)
    if call is None or depth >= _DEEPEST:
        return ()
    called: dict[str, None] = {}

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called[schema_name(func)] = None
            return func(*args, **(kwargs or {}))

    try:
        with Listen():
            function(*call.args, **call.kwargs)
    except Exception:  # it needs more than meta tensors
        return ()
    return tuple(_explain(name, platform, depth + 1) for name in called if name != schema_name(op))


def own_kernel(name: str) -> str:
    """The file of the kernel that an operator has instead of being recorded; else empty."""
    base = os.path.basename(kernel_file(name, "PrivateUse1"))
    folder = "lazyxla" if base.endswith(".py") else "csrc/dispatch"
    return "" if base in ("", *_RECORDED_IN) else f"{folder}/{base}"


def _composite_kernel(name: str) -> str | None:
    """Whether PyTorch has a kernel for all devices, which takes precedence over the backend:
    "implicit" if it is differentiated through its parts, else "explicit"."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(name, "CompositeImplicitAutograd"):
        return "implicit"
    if has_kernel(name, "CompositeExplicitAutograd"):
        return "explicit"
    # For an operator with a CPU kernel this kernel calls the out= form, which is recorded as the
    # operator itself.
    by_others = has_kernel(name, "CompositeExplicitAutogradNonFunctional")
    return "explicit" if by_others and not has_kernel(name, "CPU") else None


def _where(function: Callable[..., Any]) -> str:
    """File, line and name of a function; the file from its package on."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    path = code.co_filename
    for package in ("lazyxla", "torch"):
        head, mark, tail = path.rpartition(f"/{package}/")
        if mark:
            # The outermost directory of that name is the package.
            path = f"{package}/" + path.split(mark, 1)[1] if head.count(mark) == 0 else tail
            break
    return f"{path}:{code.co_firstlineno}, {code.co_name}"
