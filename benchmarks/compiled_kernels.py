"""What TPUs' compiler makes of norms, rotary positions and kernels: without a TPU.

    python benchmarks/compiled_kernels.py                      # for one v5e
    python benchmarks/compiled_kernels.py --only norms kernels --topology v5p:2x2x1

Bytes moved are from and to main memory (memory_traffic.py), and "of least" divides them by what
reading each input once and writing each output once would be. Cycles are libtpu's estimate of its
own operations. It knows nothing of kernels: to the cycles' time comes what the FLOPs and bytes that
a kernel says it has take at the chip's published peaks, whichever is longer. Of one that does not
say them it is the bytes of its operands and results.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import memory_traffic  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: E402

import lazyxla  # noqa: E402
from lazyxla import paged_attention  # noqa: E402
from lazyxla.lowering.builder import Builder  # noqa: E402
from lazyxla.lowering.cuda.builder import CudaBuilder  # noqa: E402
from lazyxla.lowering.tpu import attention as attention_tpu  # noqa: E402
from lazyxla.lowering.tpu import grouped_matmul as grouped_matmul_tpu  # noqa: E402
from lazyxla.lowering.tpu.builder import TpuBuilder  # noqa: E402

MiB = 1 << 20


class Case(NamedTuple):
    """A program to compile; `least` are the bytes that it must move, if that is known."""

    what: str
    how: str
    call: Any
    inputs: tuple[Any, ...]
    least: int | None = None
    train_step: Any = None
    topology: str | None = None
    """What it is for, if not for what the command is told."""


class Row(NamedTuple):
    case: Case
    cycles: int
    kernels: int
    kernel_seconds: float
    moved: int
    temporary: int
    clock: float | None

    @property
    def seconds(self) -> float | None:
        """None if the compiler does not estimate times, as that for GPUs, or the clock is not
        known."""
        return self.cycles / self.clock + self.kernel_seconds if self.clock else None


def measure(case: Case, topology: str) -> Row:
    """Compiles a program and adds up what is known of it."""
    with contextlib.ExitStack() as stack:
        for patch in getattr(case.call, "patches", ()):
            stack.enter_context(patch)
        program = lazyxla.aot.compile(
            case.call,
            case.inputs,
            topology=case.topology or topology,
            train_step=case.train_step,
        )
    chip, kernels, seconds = program.chip, memory_traffic.kernels(program), 0.0
    if chip is not None:
        seconds = sum(
            max((k.flops or 0) / chip.flops_per_second, k.nbytes / chip.bytes_per_second)
            for k in kernels
        )
    return Row(
        case,
        program.estimated_cycles or 0,
        len(kernels),
        seconds,
        memory_traffic.moved(program),
        program.memory_stats()["temporary"],
        chip.cycles_per_second if chip is not None else None,
    )


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def with_gradients(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The results' gradients alone, of the first `count` arguments; the last ones are those of the
    results."""

    def backward(*args: Any) -> Any:
        inputs = [x.detach().requires_grad_() for x in args[:count]]
        results = call(*inputs, *args[count:])
        results = results if isinstance(results, tuple) else (results,)
        return torch.autograd.grad(results, inputs, args[-len(results) :])

    return backward


def training(model: nn.Module) -> Callable[..., Any]:
    def step(*args: Tensor) -> list[Tensor]:
        first, *others = args
        first = first.detach().requires_grad_()
        loss = model(first, *others).float().square().mean()
        return list(torch.autograd.grad(loss, [first, *model.parameters()]))

    return step


# ---- norms ----


def norm(x: Tensor, weight: Tensor, *_: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def added_norm(x: Tensor, y: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return norm(total, weight), total


def norms() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, columns in ((8192, 1024), (8192, 4096), (2048, 8192)):
            x, w = meta(rows, columns, dtype=dtype), meta(columns, dtype=dtype)
            of = f"{_name(dtype)} {rows} x {columns}"
            yield Case(f"RMSNorm, {of}", "", norm, (x, w), 2 * x.nbytes)
            yield Case(f"with addition, {of}", "", added_norm, (x, x, w), 4 * x.nbytes)
            back, added_back = with_gradients(norm, 2), with_gradients(added_norm, 3)
            yield Case(f"backward, {of}", "", back, (x, w, x), 3 * x.nbytes)
            inputs = (x, x, w, x, x)
            yield Case(f"backward with addition, {of}", "", added_back, inputs, 5 * x.nbytes)


class FeedForward(nn.Module):
    """SwiGLU behind a residual addition, with or without a norm in between."""

    def __init__(self, hidden: int, inner: int, has_norm: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, 1e-6) if has_norm else nn.Identity()
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x + y
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def norms_in_models() -> Iterator[Case]:
    for hidden, inner in ((1024, 4096), (4096, 14336)):
        x = meta(8192, hidden)
        for has_norm in (False, True):
            with torch.device("meta"):
                model = FeedForward(hidden, inner, has_norm).bfloat16()
            how = "RMSNorm" if has_norm else "no norm"
            yield Case(f"feed-forward {hidden}", how, model, (x, x))
            yield Case(f"feed-forward {hidden}, trained", how, model, (x, x), None, training)


# ---- rotary positions ----


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return lazyxla.rotary_embedding(q, k, cos, sin)


ROTATIONS = {"rotate_half": formula, "kernel": kernel}


def rotations() -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32):
        for heads, size in ((16, 64), (32, 128)):
            x, table = meta(8, heads, 1024, size, dtype=dtype), meta(8, 1024, size, dtype=dtype)
            of = f"{_name(dtype)} 8 x {heads} x 1024 x {size}"
            least = 4 * x.nbytes + 2 * table.nbytes
            for how, call in ROTATIONS.items():
                yield Case(f"rotary, {of}", how, call, (x, x, table, table), least)
                inputs = (x, x, table, table, x, x)
                yield Case(f"backward, {of}", how, with_gradients(call, 2), inputs, least)


class Attention(nn.Module):
    """Projections, rotary positions, causal attention, and a projection."""

    def __init__(self, hidden: int, groups: int, size: int, rotate: Any) -> None:
        super().__init__()
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key, self.value = (nn.Linear(hidden, groups * size, bias=False) for _ in range(2))
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.size, self.rotate = size, rotate

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        if self.rotate is not None:
            q, k = self.rotate(q, k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotations_in_models() -> Iterator[Case]:
    for hidden, groups, size in ((1024, 16, 64), (4096, 8, 128)):
        x, table = meta(8, 1024, hidden), meta(8, 1024, size)
        for how, rotate in {"no positions": None, **ROTATIONS}.items():
            with torch.device("meta"):
                model = Attention(hidden, groups, size, rotate).bfloat16()
            inputs, what = (x, table, table), f"attention {hidden}, heads of {size}"
            yield Case(what, how, model, inputs)
            yield Case(f"{what}, trained", how, model, inputs, None, training)


# ---- kernels and plain XLA ----


def attention(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flexible(q: Tensor, k: Tensor, v: Tensor, call: Any = flex_attention) -> Any:
    length = q.shape[2]
    mask = create_block_mask(window, None, None, length, length, q.device)
    return call(q, k, v, block_mask=mask)


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 1024)


def compiled_flexible(*inputs: Tensor) -> Any:
    return flexible(*inputs, torch.compile(flex_attention, backend="lazyxla"))


def without_kernel(builder: type[Builder]) -> Any:
    """A platform's attention without its kernel, on all scores at once on a GPU."""
    most_scores = 1 << 62 if builder is CudaBuilder else builder.attention.most_scores
    return builder.attention._replace(kernel=None, most_scores=most_scores)


def plain(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same without the kernels that are rules' own; attention is of all scores at once."""

    @functools.wraps(call)
    def without(*args: Any) -> Any:
        return call(*args)

    without.patches = (  # type: ignore[attr-defined]
        mock.patch.object(attention_tpu, "suits", return_value=False),  # of flex_attention, too
        mock.patch.object(grouped_matmul_tpu, "suits", return_value=False),
        mock.patch.object(TpuBuilder, "attention", without_kernel(TpuBuilder)),
        mock.patch.object(CudaBuilder, "attention", without_kernel(CudaBuilder)),
    )
    return without


def paged(*inputs: Tensor) -> Tensor:
    return lazyxla.ragged_paged_attention(*inputs)


def paged_reference(*inputs: Tensor) -> Tensor:
    return paged_attention._reference(list(inputs), inputs[0].shape[-1] ** -0.5, None, None)


def grouped(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, y, offs=ends)


def one_product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x @ y[0]


def kernels() -> Iterator[Case]:
    q = meta(1, 8, 4096, 128)
    back = with_gradients(attention, 3)
    of = "1 x 8 x 4096 x 128"
    yield Case(f"causal attention, {of}", "kernel", attention, (q, q, q))
    yield Case(f"causal attention, {of}", "XLA", plain(attention), (q, q, q))
    sees = "flex_attention that sees 1024 tokens"
    yield Case(f"{sees}, {of}", "kernel", compiled_flexible, (q, q, q))
    yield Case(f"{sees}, {of}", "XLA", flexible, (q, q, q))
    yield Case(f"attention and backward, {of}", "kernel", back, (q, q, q, q))
    yield Case(f"attention and backward, {of}", "XLA", plain(back), (q, q, q, q))
    # 32 sequences of up to 2048 tokens in pages of 16, one new token of each.
    pages = [meta(*n, dtype=torch.int32) for n in ((32,), (32, 128), (33,), (1,))]
    inputs = (meta(32, 32, 128), meta(4096, 16, 16, 128), *pages)
    yield Case("paged attention, 32 x 2048 tokens", "kernel", paged, inputs)
    yield Case("paged attention, 32 x 2048 tokens", "XLA", paged_reference, inputs)
    inputs = (meta(8192, 4096), meta(8, 4096, 4096), meta(8, dtype=torch.int32))
    of = "8192 x 4096 x 4096 in 8 groups"
    yield Case(of, "kernel", grouped, inputs)
    yield Case(of, "XLA", plain(grouped), inputs)
    yield Case("8192 x 4096 x 4096", "one product", one_product, inputs)


def kernels_on_a_gpu() -> Iterator[Case]:
    q = meta(1, 8, 4096, 128)
    back = with_gradients(attention, 3)
    for how, change in {"kernel": lambda call: call, "XLA": plain}.items():
        of = "causal attention, 1 x 8 x 4096 x 128"
        yield Case(of, how, change(attention), (q, q, q), topology="h100")
        yield Case(f"{of}, and backward", how, change(back), (q, q, q, q), topology="h100")


# ---- the table ----

PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "norms": norms,
    "norms_in_models": norms_in_models,
    "rotary": rotations,
    "rotary_in_models": rotations_in_models,
    "kernels": kernels,
    "kernels_on_a_gpu": kernels_on_a_gpu,
}

TITLES = ("", "", "cycles", "kernels", "MiB moved", "of least", "temporary MiB", "estimated ms")


def cells(row: Row) -> tuple[str, ...]:
    least = f"{row.moved / row.case.least:.2f}" if row.case.least else ""
    return (
        row.case.what,
        row.case.how,
        f"{row.cycles:,}" if row.cycles else "",
        f"{row.kernels or ''}",
        f"{row.moved / MiB:,.0f}",
        least,
        f"{row.temporary / MiB:,.0f}",
        f"{row.seconds * 1e3:.2f}" if row.seconds is not None else "",
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--topology", default="v5e:1x1")
    args = parser.parse_args()
    for part in args.only:
        print(f"| {' | '.join((part.replace('_', ' '), *TITLES[1:]))} |\n|{'---|' * len(TITLES)}")
        for case in PARTS[part]():
            print(f"| {' | '.join(cells(measure(case, args.topology)))} |", flush=True)
        print()


if __name__ == "__main__":
    main()
