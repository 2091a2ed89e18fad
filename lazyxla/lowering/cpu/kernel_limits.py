"""From which size on PyTorch's kernels are faster than what XLA's compiler makes of the same work.

That depends on the processor, so the sizes are measured: `python -m lazyxla.kernel_measurements`
keeps a table for the machine that it runs on. Other machines use the one below.

The size of matmuls and convolutions is their multiplications and additions, of attention the number
of keys, of all others the number of elements. A kind without a size for a dtype is XLA's; matmuls
and convolutions of narrow floats then are those of float32, in which XLA computes them, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch

Limits = Mapping[str, float]
"""The least size from which a call pays, of "matmul bfloat16" and the like; infinite: none does."""

_OF_ALL_DTYPES: Limits = {
    "function": 2**14,
    "max pooling": 1,
    "order statistic": 2**12,
    "running result": 2**12,
    "sampling": 2**10,
    "sort": 2**11,
    "topk": 2**14,
    "vector product": 2**12,
}
"""The kinds for which the dtype makes no difference; measured on two CPUs without AVX-512 of an AMD
EPYC (Zen 3)."""

_OF_ALL_PROCESSORS: Limits = {
    "convolution of few channels float32": 1e6,
    "convolution of volumes float32": 1e5,
    "matmul float64": 6e6,
    "matmul complex64": 3e5,
    "matmul complex128": 3e5,
}
"""On the same machine."""

_OF_BFLOAT16: Limits = {
    "matmul bfloat16": 1e7,
    "convolution float32": 1e8,
    "convolution bfloat16": 1e7,
    "attention float32": 1,
    "attention bfloat16": 512,
}
"""Of processors that multiply twice as many bfloat16 as float32 at a time; measured on two CPUs of
an AMD EPYC (Zen 4)."""

_OF_PROCESSORS: tuple[tuple[str, Limits], ...] = (
    ("amx_bf16", _OF_BFLOAT16),
    # Two CPUs of an Intel Xeon (Sapphire Rapids or later) whose AMX the virtual machine hides:
    # AVX-512 alone multiplies no more bfloat16 than float32 there.
    (
        "avx512_fp16",
        {
            "matmul float32": 3e7,
            "matmul of few rows float32": 4e6,
            "convolution float32": 1e8,
            "attention float32": 1,
            "attention bfloat16": 1024,
        },
    ),
    ("avx512_bf16", _OF_BFLOAT16),
    # The AMD processor with both libraries held to AVX2, in float32.
    ("", {"convolution float32": 1e8, "attention float32": 1}),
)
"""What depends on the processor: of those with a capability, as `torch.cpu.get_capabilities` names
it; the first that a processor has counts, the last entry is for all."""

_kept: Callable[[], Limits | None] | None = None
_current: Limits | None = None


def read_from(kept: Callable[[], Limits | None]) -> None:
    """`kept` returns the limits that were measured on this machine, or None."""
    global _kept, _current
    _kept, _current = kept, None


def pays(kind: str, dtype: torch.dtype, size: int) -> bool:
    """Whether a call is faster for work of this kind and size."""
    least = current().get(entry(kind, dtype))
    return least is not None and size >= least


def entry(kind: str, dtype: torch.dtype) -> str:
    """What a table names a kind of work in a dtype."""
    return kind if kind in _OF_ALL_DTYPES else f"{kind} {str(dtype).removeprefix('torch.')}"


def current() -> Limits:
    """The limits that this process uses."""
    global _current
    if _current is None:
        measured = _kept() if _kept is not None else None
        _current = {
            **_OF_ALL_DTYPES,
            **_OF_ALL_PROCESSORS,
            **_of_processor(),
            **(measured or {}),
        }
    return _current


def describe() -> str:
    """The limits that this process uses, in one line."""
    return ", ".join(f"{name} {least:g}" for name, least in sorted(current().items()))


def _of_processor() -> Limits:
    found = torch.cpu.get_capabilities()
    return next(limits for name, limits in _OF_PROCESSORS if not name or found.get(name))


@contextlib.contextmanager
def using(limits: Limits) -> Iterator[None]:
    """Programs that are lowered in the block use other limits. Those that are compiled already stay
    as they are."""
    global _current
    before, _current = _current, limits
    try:
        yield
    finally:
        _current = before
