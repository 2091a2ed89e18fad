"""Writes docs/operators.md: how every operator of PyTorch's runs, on each platform.

    python -m tests.operator_table

The source is what `lazyxla.lowering.explain` tells. test_operator_table.py checks that the file is
up to date.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lazyxla.lowering import check_lowering, explain, lookup
from lazyxla.lowering.explanation import HOW
from lazyxla.lowering.operators import find_op
from lazyxla.lowering.samples import DTYPES, Sample, samples

FILE = Path(__file__).resolve().parent.parent / "docs" / "operators.md"
PLATFORMS = ("cpu", "cuda", "tpu")

# Their CPU kernels end the process if the made-up arguments do not fit together.
_FRAGILE = (
    "aten::_embedding_bag",
    "aten::_embedding_bag_forward_only",
    "aten::smooth_l1_loss_backward",
)

# Sparse, nested and quantized tensors, which do not exist on the device, and PyTorch's own tests.
_NO_DENSE = re.compile("sparse|nested|jagged|quantize|aten::_test_|aten::_foobar")

_TEXT = """\
# Operators

Written by `make docs`, for torch {version}. `lazyxla.lowering.explain("aten::...")` tells more of
each, of views, in-place and `out=` forms (which run as the functional form and an assignment), and
of operators of your own.

| How it runs | Operators on cpu | on cuda | on tpu |
|---|---|---|---|
{counts}

*dtypes* lists those of which both PyTorch's CPU kernel and the lowering take a small call; a dash
means that the call made up for it fits one of them for no dtype, so nothing is said. What
[opinfo.md](opinfo.md) checks are values. PyTorch's operators that are neither in-place nor `out=`
forms nor views are listed, without those that decompose before any device sees them
(CompositeImplicitAutograd) and those that PyTorch's own CPU does not have for dense tensors.

| Operator | dtypes | cpu | cuda | tpu |
|---|---|---|---|---|
{rows}
"""


def operators() -> list[str]:
    """The operators that the table lists, sorted."""
    return sorted(n for n in torch._C._dispatch_get_all_op_names() if _is_listed(n))


def _is_listed(name: str) -> bool:
    op: Any = find_op(name) if name.startswith("aten::") else None
    if op is None or op._schema.is_mutable or _NO_DENSE.search(name):
        return False
    if any(r.alias_info is not None for r in op._schema.returns):
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return False
    return bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"))


def dtypes(name: str) -> str:
    """The dtypes of which a small call runs on PyTorch's CPU and is lowered."""
    op: Any = find_op(name)
    way = lookup.how(name)
    if name in _FRAGILE or way not in ("rule", "jax", "decomposition", "call"):
        return "-"
    found = {d for d, call in samples(op) if _runs_on_cpu(call) and _is_lowered(call, way)}
    return _names(found) or "-"


def _is_lowered(call: Sample, way: str) -> bool:
    # Tracing a JAX rule takes long, and a host call is the CPU's kernel itself.
    return way in ("jax", "call") or check_lowering(call.program(), "cpu") != "host"


def _runs_on_cpu(call: Sample) -> bool:
    """Whether PyTorch's CPU kernel takes the call, with zeros for data."""

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    try:
        call.op(*tree_map(to_cpu, call.args), **tree_map(to_cpu, call.kwargs))
    except Exception:  # whatever way the kernel has of refusing
        return False
    return True


_GROUPS = {
    "bool": {torch.bool},
    "integers": {torch.uint8, torch.int32, torch.int64},
    "floats": {torch.bfloat16, torch.float16, torch.float32, torch.float64},
    "complex": {torch.complex64},
}


def _names(found: set[torch.dtype]) -> str:
    if found == set(DTYPES):
        return "all"
    words = []
    for group, members in _GROUPS.items():
        if members <= found:
            words.append(group)
        else:
            words += [str(d).removeprefix("torch.") for d in DTYPES if d in members & found]
    return ", ".join(words)


def table() -> str:
    """The page's text."""
    rows, counts = [], {p: Counter[str]() for p in PLATFORMS}
    for name in operators():
        ways = [explain(name, platform).how for platform in PLATFORMS]
        for platform, way in zip(PLATFORMS, ways, strict=True):
            counts[platform][way] += 1
        rows.append(f"| `{name}` | {dtypes(name)} | " + " | ".join(ways) + " |")
    summary = [
        f"| **{way}**: {meaning} | " + " | ".join(str(counts[p][way]) for p in PLATFORMS) + " |"
        for way, meaning in HOW.items()
        if any(counts[p][way] for p in PLATFORMS)
    ]
    version = ".".join(torch.__version__.split(".")[:2])
    return _TEXT.format(version=version, counts="\n".join(summary), rows="\n".join(rows))


if __name__ == "__main__":
    FILE.write_text(table())
