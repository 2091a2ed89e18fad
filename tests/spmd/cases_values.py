"""Views, writes and sizes that do not divide: values do not notice that memory is sharded."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import OWN_DEVICES, bytes_on_devices, grid, sharded, spec_of
from models import MESH

import lazyxla
from tests.support import DEVICE, counted

# ---- sizes that do not divide ----


@pytest.mark.parametrize("size", [1, 3, 5, 7, 9])
def test_uneven_sizes(size: int) -> None:
    x = torch.randn(size, 3)
    d = sharded(x, "data")
    assert torch.equal(d.cpu(), x)
    for f in (
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: t.prod(0),
        lambda t: t.amax(0),
        lambda t: t.softmax(0),
        lambda t: t.t() @ t,
        lambda t: t.flip(0),
        lambda t: t[size // 2 :],
        lambda t: t.reshape(-1).cumsum(0),
        lambda t: torch.sort(t, 0).values,
    ):
        torch.testing.assert_close(f(d).cpu(), f(x))
    d.mul_(2).add_(1)
    d[0] = 5
    y = x * 2 + 1
    y[0] = 5
    torch.testing.assert_close(d.cpu(), y)
    assert spec_of(d) == ("data", None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_uneven_sizes_of_other_types(dtype: torch.dtype) -> None:
    x = torch.randn(7, 5).to(dtype)
    d = sharded(x, "model", "data")
    d.logical_not_() if dtype == torch.bool else d.neg_()
    expected = ~x if dtype == torch.bool else -x
    assert torch.equal(d.cpu(), expected)


# ---- views and writes ----


def writes() -> dict[str, Callable[[torch.Tensor], Any]]:
    def through_transpose(t: torch.Tensor) -> None:
        t.t()[1] = 4

    def through_flat(t: torch.Tensor) -> None:
        t.view(-1).mul_(2)

    def through_flat_copy(t: torch.Tensor) -> None:
        t.view(-1).copy_(torch.ones(48).to(t.device))

    def through_slices(t: torch.Tensor) -> None:
        t[1:7:2, ::3] += t[0:6:2, 1::3]

    def through_data(t: torch.Tensor) -> None:
        t.data.copy_(torch.full((8, 6), 9.0))

    def of_a_part_from_the_host(t: torch.Tensor) -> None:
        t[2:5].copy_(torch.zeros(3, 6))

    def of_another_type(t: torch.Tensor) -> None:
        t.copy_(torch.arange(48).reshape(8, 6))

    def of_a_whole_tensor(t: torch.Tensor) -> None:
        t.copy_(torch.arange(48.0).to(t.device).reshape(8, 6))

    def fill(t: torch.Tensor) -> None:
        t.fill_(3)

    def zero(t: torch.Tensor) -> None:
        t.zero_()

    def by_index(t: torch.Tensor) -> None:
        t[torch.tensor([1, 3]), torch.tensor([0, 5])] = torch.tensor([10.0, 20.0]).to(t.device)

    def by_mask(t: torch.Tensor) -> None:
        t[t > 20] = 0

    def out(t: torch.Tensor) -> None:
        torch.add(t, 1, out=t)

    def swap(t: torch.Tensor) -> None:
        t.copy_(t.flip(0))

    return {name: f for name, f in locals().items() if callable(f)}


@pytest.mark.parametrize("name", writes())
@pytest.mark.parametrize("mode", [False, True, "fused"])
def test_writes_stay_spread(name: str, mode: Any) -> None:
    x = grid(8, 6)
    with lazyxla.eager_mode(mode):
        d = sharded(x, "data", "model")
        for _ in range(2):
            writes()[name](x)
            writes()[name](d)
            torch.testing.assert_close(d.cpu(), x)
            assert spec_of(d) == ("data", "model")


def test_reading_views() -> None:
    x = grid(8, 6)
    d = sharded(x, "data", "model")
    for f in (
        lambda t: t.t(),
        lambda t: t[3],
        lambda t: t[:, ::2],
        lambda t: t.view(4, 12),
        lambda t: t.as_strided((3, 3), (7, 1), 2),
        lambda t: t.unfold(0, 3, 2),
        lambda t: t.diagonal(),
        lambda t: t.reshape(2, 4, 6).permute(2, 0, 1).contiguous(),
    ):
        assert torch.equal(f(d).cpu(), f(x))
    assert d[3, 4].item() == 22
    assert d.tolist() == x.tolist()


def test_channels_last() -> None:
    x = grid(4, 6 * 5 * 5).reshape(4, 6, 5, 5).to(memory_format=torch.channels_last)
    d = sharded(x, "data", "model")
    d.add_(1)
    y = torch.nn.functional.conv2d(d, torch.ones(2, 6, 3, 3, device=DEVICE))
    torch.testing.assert_close(d.cpu(), x + 1)
    torch.testing.assert_close(y.cpu(), torch.nn.functional.conv2d(x + 1, torch.ones(2, 6, 3, 3)))
    assert spec_of(d) == ("data", "model", None, None)
    assert d.stride() == x.stride()


def test_depthwise_convolutions() -> None:
    """Their terms are in a function of their own, which is partitioned as well."""
    x, w = grid(4, 6 * 5 * 5).reshape(4, 6, 5, 5), grid(6, 9).reshape(6, 1, 3, 3)
    ours, weight = sharded(x, "data"), w.to(DEVICE).requires_grad_()
    w.requires_grad_()
    y = torch.nn.functional.conv2d(ours, weight, padding=1, groups=6)
    expected = torch.nn.functional.conv2d(x, w, padding=1, groups=6)
    assert spec_of(y) == ("data", None, None, None)
    torch.testing.assert_close(y.detach().cpu(), expected.detach())
    y.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), w.grad)


@pytest.mark.parametrize(
    "like",
    [
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.rand_like,
        lambda t: torch.full_like(t, 2.0),
        lambda t: torch.zeros_like(t, dtype=torch.bfloat16),
    ],
)
def test_likes_are_spread_alike(like: Callable[[torch.Tensor], torch.Tensor]) -> None:
    d = sharded(grid(64, 64), "data", "model")
    lazyxla.sync(wait=True)
    before = bytes_on_devices()
    made = like(d)
    lazyxla.sync(wait=True)
    assert spec_of(made) == ("data", "model")
    made.add_(1)
    lazyxla.sync(wait=True)
    assert spec_of(made) == ("data", "model")
    assert max(b - a for a, b in zip(before, bytes_on_devices())) <= 3 * 64 * 64 * 4 // 8


def test_views_that_cover_the_memory_leave_it_spread_as_it_was() -> None:
    """A write through one sets all elements, in another order or as another type."""
    x = grid(4, 4)
    d = sharded(x, "data", None)
    d.t().mul_(2)
    d.t().copy_(d.clone())
    torch.testing.assert_close(d.cpu(), (x * 2).t())
    assert spec_of(d) == ("data", None)
    bits = torch.arange(8, dtype=torch.uint8).reshape(1, 8)
    b = sharded(bits, None, "model")
    b.view(torch.int8)[::2] = -1
    assert torch.equal(b.cpu(), torch.full((1, 8), 255, dtype=torch.uint8))
    assert spec_of(b) == (None, "model")


def test_one_value_that_is_spread_in_two_ways() -> None:
    x = grid(8, 6)
    d = sharded(x, "data")
    total = d * 2
    same = total.clone()
    lazyxla.shard(total, MESH, ("model",))
    lazyxla.shard(same, MESH, (None, "data"))
    with counted() as n:
        lazyxla.sync()
    assert n.executions == 1
    assert spec_of(total) == ("model", None)
    assert spec_of(same) == (None, "data")
    assert torch.equal(total.cpu(), x * 2)
    assert torch.equal(same.cpu(), x * 2)


def test_parts_of_memory_that_was_not_written() -> None:
    """As a checkpoint of it asks for; a read gives zeros, too."""
    d = lazyxla.shard(torch.empty(8, 6, device=DEVICE), MESH, ("data",))
    blocks = lazyxla._C.local_blocks(d)
    assert sum(host.numel() for _, host in blocks) == 8 * 6 * OWN_DEVICES // 8
    assert not any(host.any() for _, host in blocks)
    assert spec_of(d) == ("data", None)


def test_copies_of_memory_are_spread_alike() -> None:
    d = sharded(grid(8, 6), "data", "model")
    before = bytes_on_devices()
    made, view = copy.deepcopy((d, d[2:]))
    assert spec_of(made) == ("data", "model")
    assert bytes_on_devices() == before  # until one of them is written to
    view.add_(1)  # of the same memory as the other copy
    expected = grid(8, 6)
    expected[2:] += 1
    assert torch.equal(made.cpu(), expected)
    assert torch.equal(d.cpu(), grid(8, 6))
    assert spec_of(made) == ("data", "model")
    del view
    assert [b - a for a, b in zip(before, bytes_on_devices())] == [8 * 6 * 4 // 8] * OWN_DEVICES


# ---- memory ----


def test_what_many_devices_consume_is_counted_once() -> None:
    """Of so many buffers that a thread of its own frees them (csrc/pjrt/disposal.h)."""
    tensors, steps = 40, 20
    xs = [sharded(torch.full((64,), float(i)), "data") for i in range(tensors)]

    def step() -> None:
        for x in xs:
            x.add_(1)
        lazyxla.sync()

    for _ in range(3):  # until the numbers are known to vary or not
        step()
    before = bytes_on_devices()
    for index in range(OWN_DEVICES):
        torch.lazyxla.reset_peak_memory_stats(index)
        torch.lazyxla.reset_accumulated_memory_stats(index)
    executions = lazyxla.counters()["executions"]
    for _ in range(steps):
        step()
    assert lazyxla.counters()["executions"] == executions + steps
    assert bytes_on_devices() == before
    for index in range(OWN_DEVICES):
        stats = lazyxla.memory_stats(index)
        assert stats["allocated_bytes.all.peak"] == before[index]
        assert stats["allocation.all.allocated"] == steps * tensors
        assert stats["allocation.all.freed"] == steps * tensors
    for i, x in enumerate(xs):
        assert torch.equal(x.cpu(), torch.full((64,), float(i + 3 + steps)))


def test_out_of_memory_names_the_largest_tensors_and_how_they_are_spread() -> None:
    model = torch.nn.Linear(64, 4096, bias=False)
    lazyxla.shard(model, MESH, ("data", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(sharded(torch.ones(8, 64), "data")).sum().backward()
    optimizer.step()
    lazyxla.sync()
    too_large = sharded(torch.ones(8, 64), "data").expand(1 << 40, 8, 64) + model.weight.sum()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        lazyxla.sync()
    told = str(caught.value)
    assert "are free on" in told
    weight = "float32[4096, 64], sharded as ('data', None) over"
    assert f"256.0 KiB: weight, {weight}" in told
    assert f"256.0 KiB: momentum_buffer of weight, {weight}" in told
    del too_large


def test_memory_that_a_program_takes_over_counts_as_free() -> None:
    def needed(is_kept: bool) -> int:
        d = sharded(grid(256, 1024), "data", "model")
        lazyxla.sync(wait=True)
        kept = d.clone() if is_kept else None  # the same arrays, which are not given away then
        lazyxla.sync(wait=True)
        d.mul_(2)
        too_large = sharded(torch.ones(8, 64), "data").expand(1 << 40, 8, 64) + d.sum()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            lazyxla.sync()
        del too_large, kept
        assert torch.equal(d.cpu(), grid(256, 1024))  # as before
        told = re.search(r"the program needs (\d+) bytes", str(caught.value))
        assert told is not None
        return int(told[1])

    own = 256 * 1024 * 4 * OWN_DEVICES // 8  # the bytes on this process's devices
    assert needed(is_kept=True) - needed(is_kept=False) == own
