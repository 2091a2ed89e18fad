"""bfloat16 and float8 on the CPU, which XLA's compiler converts for whatever is done with them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import lazyxla
from lazyxla.lowering import lower_to_text
from lazyxla.lowering.cpu import kernel_limits
from tests.lowering.harness import check, record
from tests.support import DEVICE, counted

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "concatenate": lambda x: torch.cat([x, x[:2]], 0),
    "stack": lambda x: torch.stack([x, x], 1),
    "roll": lambda x: x.roll((1, 2), (0, 1)),
    "pad": lambda x: F.pad(x, (1, 2, -1, 3), value=-2.0),
    "reflect": lambda x: F.pad(x[None], (2, 1), mode="reflect"),
    "diagonals": torch.diag_embed,
    "slice": lambda x: x[1:7:2, 3:].clone(),
    "flip": lambda x: x.flip(0, 1),
    "rows": lambda x: x[torch.tensor([3, 0, -1], device=x.device)],
    "gather": lambda x: x.gather(1, torch.arange(16, device=x.device).view(8, 2)),
    "scatter": lambda x: x.scatter(1, torch.arange(16, device=x.device).view(8, 2), x[:, 1:3]),
    "written rows": lambda x: x.index_put((torch.tensor([5, 2], device=x.device),), x[:2]),
    "chunks": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
}


def _write_rows(x: Tensor) -> None:
    x[:, :, 5:6] = x[:, :, :1] + 1


def _write_shifted(x: Tensor) -> None:
    x[:, :, 1:] = x[:, :, :-1] * 2  # reads what it writes


def _copy_indices(x: Tensor) -> None:
    x.index_copy_(2, torch.tensor([7], device=x.device), x[:, :, :1] - 1)


def _write_twice(x: Tensor) -> None:
    x[..., 3] = 1
    x[:, 1:3, 4:9, 2:] = x[:, :2, :5, 2:].clone()


def _write_column(x: Tensor) -> None:
    x[:, 1] = x.sum(1)


WRITES = (_write_rows, _write_shifted, _copy_indices, _write_twice, _write_column)


def special(dtype: torch.dtype) -> Tensor:
    """Each bit pattern of the dtype, nan among them, or of its first bits."""
    bits = torch.arange(256, dtype=torch.uint8).view(8, 32)
    if dtype.itemsize == 1:
        return bits.view(dtype)
    return (bits.to(torch.int16) << 8).view(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in MOVES),
        # PyTorch's CPU kernels of the others take no float8.
        *((name, dtype) for name in ("concatenate", "stack", "chunks") for dtype in FLOAT8),
    ],
    ids=str,
)
def test_they_are_moved_as_integers(name: str, dtype: torch.dtype) -> None:
    move, x = MOVES[name], special(dtype)
    text = lazyxla.stablehlo(move, x.to(DEVICE))
    assert not re.search(r"stablehlo\.convert.*x(bf16|f8E\w+|f32)>", text)
    moved = re.findall(r"stablehlo\.(?:concatenate|pad|slice|reverse|gather).*", text)
    assert all(re.search(r"(ui(8|16)|i32|i64)>$", line.strip()) for line in moved), moved
    assert "bitcast_convert" in text
    got, expected = move(x.to(DEVICE)).cpu(), move(x)
    bits = torch.uint8 if dtype in FLOAT8 else torch.int16
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits))


@pytest.mark.parametrize("name", ["amax", "amin", "max", "argmin"])
def test_extrema_are_those_of_float32(name: str) -> None:
    """In bfloat16 XLA would round the maximum of each two elements."""

    def extremum(x: Tensor) -> Tensor:
        found = getattr(torch, name)(x, -1)
        return found[0] if name == "max" else found  # type: ignore[no-any-return]

    x = torch.randn(9, 70).bfloat16()
    x[3, 5] = float("nan")
    text = lazyxla.stablehlo(extremum, x.to(DEVICE))
    assert not re.search(r"stablehlo\.(maximum|minimum).*bf16", text)
    torch.testing.assert_close(extremum(x.to(DEVICE)).cpu(), extremum(x), equal_nan=True)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("shape", [(1, 4, 65, 64), (2, 4, 65, 32), (16, 4, 65, 4)], ids=str)
def test_they_are_written_in_place(write: Callable[[Tensor], None], shape: tuple[int, ...]) -> None:
    """XLA would copy the whole tensor. What other tensors read is what was there before."""

    def run(x: Tensor) -> list[Tensor]:
        kept, seen = x.clone(), x * 2
        for _ in range(3):
            write(x)
            seen = seen + x
        return [x, seen, kept]

    x = torch.randn(shape).bfloat16()
    text = lazyxla.stablehlo(run, x.to(DEVICE))
    writes = [line for line in text.splitlines() if "dynamic_update_slice" in line]
    assert writes
    assert all("output_operand_aliases = [#stablehlo" in line for line in writes)
    assert "stablehlo.dynamic_update_slice" not in text
    on_device = x.to(DEVICE)
    with counted() as n:
        got = run(on_device)
        lazyxla.sync(wait=True)
    assert (n.executions, n.host_calls, n.fallbacks) == (1, 0, 0)
    assert n.kernel_calls == len(writes)
    for ours, theirs in zip(got, run(x.clone()), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def test_a_write_waits_for_the_readers_before_it() -> None:
    """Over several programs, whose buffers it takes over."""
    x = torch.randn(1, 8, 512, 16).bfloat16()
    y = x.to(DEVICE)
    ours, theirs = [], []
    for step in range(20):
        for tensor, results in ((x, theirs), (y, ours)):
            tensor[:, :, step : step + 1] = tensor.float().mean((2,), keepdim=True).bfloat16()
            results.append(tensor.float().sum((1, 3)))
        lazyxla.sync()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-2, atol=1e-2)  # of rounded means


def test_writes_clamp_as_xla_does() -> None:
    write = torch.ops.lazyxla_host.dynamic_update_slice
    for start, expected in ((-2, 0), (3, 3), (9, 4)):
        x = torch.zeros(6)
        write(x, torch.ones(2), [torch.tensor(start)])
        assert x.nonzero().flatten().tolist() == [expected, expected + 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [(1,), (2,), (2, 2), (5,)], ids=str)
def test_few_rows_of_narrow_floats_are_multiplied_apart(
    rows: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA would write the weight to memory as float32."""
    monkeypatch.setattr(kernel_limits, "pays", lambda *_: False)
    x, w = torch.randn(*rows, 64).to(dtype), torch.randn(48, 64).to(dtype)
    apart = dtype.itemsize == 2 and 1 < math.prod(rows) <= 4
    for bias in (None, torch.randn(48).to(dtype)):
        recorded = record("aten::linear", x, w, bias)
        text = lower_to_text(recorded.program, "cpu")
        assert text.count("stablehlo.dot_general") == (math.prod(rows) if apart else 1)
        check("aten::linear", x, w, bias)
