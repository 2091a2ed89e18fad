"""What PyTorch declares about its operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

META_NAMESPACE = "lazyxla_meta"
"""Of operators that infer what torch's yield: ``lazyxla/meta_functions.py``."""


def find_op(name: str) -> Any:
    """The operator overload that a schema name stands for, or None."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except (AttributeError, RuntimeError):  # RuntimeError: it is TorchScript's only
        return None


def schema_name(op: Any) -> str:
    """The name of an operator overload: aten::add.Tensor, and aten::addmm for a default one."""
    name = op._schema.name
    return f"{name}.{op._schema.overload_name}" if op._schema.overload_name else name


def kernel_file(name: str, key: str) -> str:
    """The file, in C++ or Python, that registers an operator's kernel for a dispatch key; or ""."""
    from lazyxla import _C

    place: str = _C.kernel_origin(name, key)  # registered at FILE:LINE
    return place.removeprefix("registered at ").rpartition(":")[0]


@functools.lru_cache(maxsize=4096)
def on_meta(op: Any) -> Any:
    """The operator to call on meta tensors to infer an operator's results: ours, if there is
    one."""
    namespace, _, rest = schema_name(op).partition("::")
    found = find_op(f"{META_NAMESPACE}::{rest}") if namespace == "aten" else None
    return op if found is None else found


@functools.lru_cache(maxsize=4096)
def schema_of(op: Any) -> list[tuple[str, str, Any]]:
    """Name, type and default of an operator's arguments."""
    return [(a.name, str(a.type), a.default_value) for a in op._schema.arguments]


def draws(op: Any) -> bool:
    """Whether an operator draws random numbers.

    PyTorch tags its attention for CPUs as if it had dropout.
    """
    return (
        isinstance(op, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in op.tags
        and op is not torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    )


def find_decomposition(name: str) -> Callable[..., Any] | None:
    """PyTorch's decomposition of an operator, if there is one."""
    op = find_op(name)
    if op is None:
        return None
    found = torch._decomp.decomposition_table.get(op)
    if found is None and _is_implicit(op):
        found = op.decompose
    return found


def _is_implicit(op: Any) -> bool:
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def is_composite(op: Any) -> bool:
    """Whether PyTorch takes an operator apart before a backend sees it."""
    keys = torch._C.DispatchKey
    return _is_implicit(op) and not op.has_kernel_for_dispatch_key(keys.Autograd)
