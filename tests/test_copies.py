"""Data on its way between the host and devices: copies, printing, batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lazyxla
from tests.support import DEVICE, DTYPES, assert_same, counted, numbers, on_device

# --- To and from the host ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_round_trip(dtype):
    x = numbers(2, 3).abs().to(dtype)
    assert_same(x.to(DEVICE), x)
    assert_same(x.to(DEVICE)[1, 1:], x[1, 1:])
    assert_same(x.lazyxla(), x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_round_trip_of_float8(dtype):
    x = numbers(2, 3).to(dtype)
    assert torch.equal(x.to(DEVICE).cpu().view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_conversions(source):
    """On the way and on the device; from each element type to each."""
    x = numbers(2, 3).abs().to(source) if source == torch.uint8 else numbers(2, 3).to(source)
    negative_to_unsigned = torch.uint8  # what C leaves undefined
    for target in DTYPES:
        values = x.abs() if target == negative_to_unsigned and source != torch.bool else x
        ours = on_device(values)
        assert_same(ours.to(target), values.to(target))
        assert_same(values.to(DEVICE, target), values.to(target))
        assert_same(torch.zeros(2, 3, dtype=target, device=DEVICE).copy_(values), values.to(target))
        assert torch.equal(torch.zeros(2, 3, dtype=target).copy_(ours), values.to(target))
        assert torch.equal(ours.to("cpu", target), values.to(target))


def test_fractions_are_cut_off():
    x = torch.tensor([-2.7, -0.5, 0.5, 2.7])
    for dtype in (torch.int8, torch.int32, torch.int64, torch.bool):
        assert_same(on_device(x).to(dtype), x.to(dtype))


def test_layouts_of_copies():
    x = numbers(2, 3, 4, 5)
    for y in (
        x,
        x.mT,
        x.to(memory_format=torch.channels_last),
        x[:, ::2],
        x[:, :1].expand(2, 3, 4, 5),
    ):
        assert_same(y.to(DEVICE), y.to(torch.float64).float())
        assert y.to(DEVICE).cpu().stride() == y.to(DEVICE).stride()
    ours = torch.zeros(3, 2, device=DEVICE).t()
    ours.copy_(numbers(2, 3))
    assert_same(ours, torch.zeros(3, 2).t().copy_(numbers(2, 3)))
    ours.copy_(numbers(3))
    assert_same(ours, numbers(3).expand(2, 3), strides=False)
    host = torch.zeros(4, 6)[:, ::2]
    host.copy_(on_device(numbers(4, 3)))
    assert torch.equal(host, numbers(4, 3))


def test_to_is_the_same_tensor_where_nothing_changes():
    x = on_device(numbers(2, 3))
    assert x.to(DEVICE) is x
    assert x.to("lazyxla:0", torch.float32) is x
    assert x.to(DEVICE, copy=True) is not x


def test_host_data_may_change_after_the_upload():
    x = numbers(500, 200)
    ours = x.to(DEVICE, non_blocking=True)
    array = np.arange(100_000.0)
    from_numpy = torch.from_numpy(array).to(DEVICE)
    tensor = torch.tensor(array, device=DEVICE)
    expected = x.clone()
    x.zero_()
    array[:] = 0
    assert_same(ours, expected)
    assert from_numpy[-1].item() == tensor[-1].item() == 99_999
    host = ours.cpu()
    host.zero_()
    ours.add_(1)
    assert_same(ours, expected + 1)


def test_uploads_and_downloads_are_counted():
    with counted() as n:
        x = numbers(4).to(DEVICE)
        x.cpu()
        x.tolist()
    assert (n.uploads, n.downloads, n.executions) == (1, 2, 0)


TARGETS = {
    "rows of a larger tensor": lambda: torch.zeros(5, 3)[1:3],
    "other strides": lambda: torch.zeros(3, 2).t(),
    "with gaps": lambda: torch.zeros(2, 6)[:, ::2],
    "another dtype": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "broadcast": lambda: torch.zeros(4, 2, 3),
    "conjugate": lambda: torch.zeros(2, 3, dtype=torch.complex64).conj(),
}
SOURCES = {
    "whole": lambda x: x,
    "recorded": lambda x: x + 1,
    "slice": lambda x: x.repeat(2, 1)[1:3],
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(2, 3),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_downloads_write_the_target_alone(target: str, source: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    ours, theirs = TARGETS[target](), TARGETS[target]()
    theirs.copy_(SOURCES[source](x))
    y = SOURCES[source](x.to(DEVICE))
    with counted() as n:
        ours.copy_(y)
    assert n.downloads == 1
    assert torch.equal(ours, theirs)
    memory = [torch.tensor(t.untyped_storage().tolist()) for t in (ours, theirs)]
    assert torch.equal(*memory)


def test_making_tensors():
    assert_same(torch.tensor([[1, 2], [3, 4]], device=DEVICE), torch.tensor([[1, 2], [3, 4]]))
    assert_same(torch.tensor(2.5, device=DEVICE), torch.tensor(2.5))
    assert_same(torch.as_tensor(np.eye(2), device=DEVICE), torch.eye(2, dtype=torch.float64))
    assert_same(torch.asarray([1, 2], device=DEVICE), torch.tensor([1, 2]))
    x = torch.ones(2, device=DEVICE)
    assert_same(x.new_tensor([3, 4]), torch.tensor([3.0, 4.0]))
    assert_same(x.new_full((2,), 3, dtype=torch.int64), torch.tensor([3, 3]))
    assert_same(torch.zeros(2, device=DEVICE, dtype=torch.bool), torch.zeros(2, dtype=torch.bool))
    assert_same(torch.arange(2, 10, 3, device=DEVICE), torch.arange(2, 10, 3))
    assert_same(torch.arange(0, 1, 0.25, device=DEVICE), torch.arange(0, 1, 0.25))
    assert_same(torch.linspace(-1, 1, 5, device=DEVICE), torch.linspace(-1, 1, 5))
    assert_same(torch.eye(3, 4, device=DEVICE), torch.eye(3, 4))
    assert_same(torch.full((2, 2), 7, device=DEVICE), torch.full((2, 2), 7))
    assert_same(torch.tril_indices(3, 3, device=DEVICE), torch.tril_indices(3, 3))
    assert torch.empty(2, 3, device=DEVICE).stride() == (3, 1)
    assert torch.empty_strided((2, 3), (1, 2), device=DEVICE).stride() == (1, 2)
    assert torch.rand(5, device=DEVICE).max().item() < 1
    with torch.device(DEVICE):
        assert torch.ones(2).device.type == DEVICE
        assert nn.Linear(2, 2).weight.device.type == DEVICE


def test_numbers_and_lists():
    x = on_device(numbers(2, 3))
    assert x.tolist() == numbers(2, 3).tolist()
    assert x[1, 2].item() == numbers(2, 3)[1, 2].item()
    assert isinstance((x > 0).all().item(), bool)
    assert float(x[0, 0]) == -3.0
    assert int(x.sum()) == int(numbers(2, 3).sum())
    assert bool(x[0, 0])
    assert [1, 2, 3, 4][x.argmin()] == 1
    assert list(map(len, x)) == [3, 3]
    assert f"{x[0, 1]:.2f}" == "-2.00"
    assert torch.equal(x, x.clone())
    assert not torch.equal(x, x + 1)
    assert torch.allclose(x, x + 1e-9)
    assert x[0, 0] in x


@pytest.mark.parametrize(
    "tensor",
    [
        numbers(2, 3),
        numbers(2, 3) / 7,
        numbers(3, dtype=torch.int64),
        torch.tensor(1.5),
        torch.tensor([True, False]),
        torch.tensor([float("nan"), float("inf"), 1e-9]),
        torch.zeros(0, 3),
        numbers(2, 2).to(torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.arange(3000.0),
        numbers(2, 3).T,
    ],
    ids=lambda t: f"{t.dtype}-{list(t.shape)}",
)
def test_printing(tensor):
    """The text is the CPU's, and the device."""
    text = repr(tensor)
    lines = "".join(repr(on_device(tensor)).split())
    assert lines.replace(",device='lazyxla:0'", "") == "".join(text.split())
    assert "device='lazyxla:0'" in lines


def test_printing_a_parameter():
    text = repr(nn.Parameter(on_device(numbers(2))))
    assert text == (
        "Parameter containing:\ntensor([-3., -2.], device='lazyxla:0', requires_grad=True)"
    )


def test_numpy_needs_the_host():
    x = on_device(numbers(2))
    message = "can't convert lazyxla:0 device type tensor to numpy. Use Tensor.cpu()"
    with pytest.raises(TypeError, match=message):
        x.numpy()
    with pytest.raises(TypeError, match=message):
        np.asarray(x)
    assert x.cpu().numpy().tolist() == [-3, -2]
    assert x.numpy(force=True).tolist() == [-3, -2]


# --- Between devices -----------------------------------------------------------------------------


def test_between_devices():
    x = on_device(numbers(4, 6))
    y = x.to("lazyxla:1")
    assert y.device == torch.device("lazyxla:1")
    assert_same(y, numbers(4, 6))
    y.mul_(2)
    assert_same(x, numbers(4, 6))
    assert_same((y * 3).to("lazyxla:0", torch.int32), (numbers(4, 6) * 6).to(torch.int32))
    assert_same(x[:, ::2].t().to("lazyxla:1"), numbers(4, 6)[:, ::2].t(), strides=False)
    x[1:3].copy_(y[2:])
    expected = numbers(4, 6)
    expected[1:3].copy_(numbers(4, 6)[2:] * 2)
    assert_same(x, expected)
    assert_same(x.copy_(y[0]), (numbers(4, 6) * 2)[:1].expand(4, 6), strides=False)


def test_devices_keep_their_own_memory():
    before = [lazyxla.memory_allocated(i) for i in range(2)]
    x = torch.ones(256, device="lazyxla:1")
    lazyxla.sync()
    assert [lazyxla.memory_allocated(i) - before[i] for i in range(2)] == [0, 1024]
    assert torch.ones(3, device=DEVICE).device.index == 0
    with torch.lazyxla.device(1):
        assert torch.ones(3, device=DEVICE).device.index == 1
        assert (x * 2).device.index == 1
        assert torch.ones(3).lazyxla().device.index == 1


@pytest.mark.filterwarnings("ignore:os.fork\\(\\) was called")
def test_data_loader_batches():
    data = torch.utils.data.TensorDataset(numbers(10, 3), torch.arange(10))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, pin_memory=True, timeout=60
    )
    seen = []
    for x, y in loader:
        ours = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        assert_same(ours, (x, y))
        seen += ours[1].tolist()
    assert seen == list(range(10))
    on_it = torch.utils.data.TensorDataset(on_device(numbers(10, 3)))
    batches = [batch for (batch,) in torch.utils.data.DataLoader(on_it, batch_size=5)]
    assert_same(torch.cat(batches), numbers(10, 3))
