"""Tensors of the device and arrays of the host on the same memory: no copies, no surprises."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import lazyxla
from tests.support import DTYPES, counted


def settled_memory() -> int:
    """Bytes of live arrays, once everything that runs has finished."""
    for _ in range(2):  # what is collected may have been what a run still held
        gc.collect()
        lazyxla.sync(wait=True)
    return lazyxla.memory_allocated()


@pytest.fixture(params=[False, True], ids=["lazy", "eager"])
def mode(request: Any) -> Iterator[None]:
    with lazyxla.eager_mode(request.param):
        yield


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2, torch.uint16], ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    host = torch.arange(24).reshape(4, 6).to(dtype)
    with counted() as n:
        ours = lazyxla.from_dlpack(host)
        view = lazyxla.host_view(ours)
    assert (n.uploads, n.downloads, n.nodes_recorded, n.flushes) == (0, 0, 0, 0)
    assert ours.device.type == "lazyxla"
    assert (ours.dtype, ours.shape, ours.stride()) == (dtype, host.shape, host.stride())
    assert view.data_ptr() == host.data_ptr()
    assert torch.equal(view.view(torch.uint8), host.view(torch.uint8))


def test_views_show_what_is_recorded() -> None:
    x = torch.arange(6.0, device="lazyxla").reshape(2, 3) + 1
    with counted() as n:
        view = lazyxla.host_view(x)
        assert lazyxla.host_view(x).data_ptr() == view.data_ptr()
    assert (n.flushes, n.executions, n.downloads) == (1, 1, 0)
    assert view.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_views_of_views() -> None:
    x = torch.arange(24.0, device="lazyxla").reshape(2, 3, 4) * 1
    whole = lazyxla.host_view(x)
    with counted() as n:
        for view in (
            lambda t: t[1],
            lambda t: t.mT,
            lambda t: t[:, 1:, ::2],
            lambda t: t.flatten(),
        ):
            part = lazyxla.host_view(view(x))
            assert part.data_ptr() == view(whole).data_ptr()
            assert part.stride() == view(whole).stride()
            assert torch.equal(part, view(whole))
    assert (n.executions, n.downloads) == (0, 0)
    empty = lazyxla.host_view(x[:0])
    assert empty.shape == (0, 3, 4)


def test_what_does_not_lie_in_rows_is_copied_on_the_device() -> None:
    expected = torch.arange(48.0).reshape(1, 3, 4, 4)
    x = expected.to("lazyxla").contiguous(memory_format=torch.channels_last) + 1
    bits = torch.ones(3, device="lazyxla").view(torch.int32)
    imaginary = torch.full((2,), 1j, device="lazyxla").conj()
    with counted() as n:
        assert torch.equal(lazyxla.host_view(x), expected + 1)
        assert lazyxla.host_view(bits).tolist() == [0x3F800000] * 3
        assert lazyxla.host_view(imaginary).tolist() == [-1j, -1j]
    assert n.downloads == 0


def test_writes_to_the_tensor_leave_the_view_alone(mode: None) -> None:
    x = torch.ones(1000, device="lazyxla")
    view = lazyxla.host_view(x)
    for _ in range(3):
        x.add_(1)
        lazyxla.sync()
    assert view.sum() == 1000
    assert x.sum().item() == 4000


def test_writes_to_the_tensor_leave_the_source_alone(mode: None) -> None:
    host = torch.ones(1000)
    x = lazyxla.from_dlpack(host)
    for _ in range(3):
        x.add_(1)
        lazyxla.sync()
    lazyxla.sync(wait=True)
    assert host.sum() == 1000
    assert x.sum().item() == 4000


def test_views_keep_their_memory() -> None:
    before = settled_memory()
    x = torch.ones(1000, device="lazyxla") + 1
    view = lazyxla.host_view(x)
    del x
    assert settled_memory() - before == 4000
    part = view[10:20]
    del view
    assert settled_memory() - before == 4000
    assert part.tolist() == [2] * 10
    del part
    assert settled_memory() == before


def test_sources_live_as_long_as_needed() -> None:
    array = np.arange(1000.0)
    alive = weakref.ref(array)
    x = lazyxla.from_dlpack(torch.from_numpy(array)[:])
    host = np.zeros(8 * 1000 + 64, np.uint8)
    start = -host.ctypes.data % 64
    aligned = host[start : start + 8000].view(np.float64)
    aligned[:] = array
    owner = weakref.ref(host)
    del x, array, host
    with counted() as n:
        y = lazyxla.from_dlpack(aligned)
    assert n.uploads == 0
    del aligned
    gc.collect()
    assert owner() is not None
    z = y * 2
    del y
    gc.collect()
    assert owner() is not None  # z needs it
    assert z[999].item() == 1998
    lazyxla.sync(wait=True)
    gc.collect()
    assert owner() is None
    assert alive() is None


def test_memory_that_cannot_be_shared_is_copied() -> None:
    host = torch.arange(100.0)
    for source in (host[1:], host[::2], host[:1].expand(5), host.to(torch.complex64).conj()):
        with counted() as n:
            x = lazyxla.from_dlpack(source)
        assert n.uploads == 1
        assert x.shape == source.shape
        assert torch.equal(x.cpu(), source)


def test_negative_strides_are_copied() -> None:
    for source in (np.arange(6.0)[::-1], np.arange(6).reshape(2, 3)[:, ::-1].T):
        assert lazyxla.from_dlpack(source).tolist() == source.tolist()


def test_permuted_sources_are_shared() -> None:
    host = torch.arange(48.0).reshape(1, 4, 4, 3).permute(0, 3, 1, 2)
    with counted() as n:
        x = lazyxla.from_dlpack(host, "lazyxla:1")
    assert (n.uploads, n.nodes_recorded) == (0, 0)
    assert x.device == torch.device("lazyxla:1")
    assert x.stride() == host.stride()
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal((x + 1).cpu(), host + 1)
    scalar = lazyxla.from_dlpack(torch.tensor(2.0))
    assert scalar.item() == 2


def test_gradients_stay_behind() -> None:
    x = torch.ones(3, device="lazyxla", requires_grad=True)
    view = lazyxla.host_view(x * 2)
    assert not view.requires_grad
    assert not lazyxla.from_dlpack(torch.ones(3, requires_grad=True)).requires_grad


def test_shared_inputs_cost_no_compilation() -> None:
    def step(x: torch.Tensor) -> float:
        return (x.cos() * 3).sum().item()

    batches = [torch.full((7, 3), float(i)) for i in range(3)]
    step(batches[0].to("lazyxla"))
    with counted() as n:
        results = [step(lazyxla.from_dlpack(x)) for x in batches]
    assert (n.compiles, n.executions, n.uploads) == (0, 3, 0)
    expected = [(x.cos() * 3).sum() for x in batches]
    torch.testing.assert_close(torch.tensor(results), torch.stack(expected))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_errors() -> None:
    x = torch.ones(3, device="lazyxla")
    with pytest.raises(ValueError, match="expected a tensor on a lazyxla device, got one on cpu"):
        lazyxla.host_view(torch.ones(3))
    with pytest.raises(ValueError, match="expected a tensor on the CPU, got one on lazyxla:0"):
        lazyxla.from_dlpack(x)
    with pytest.raises(ValueError, match="expected a lazyxla device, got cpu"):
        lazyxla.from_dlpack(torch.ones(3), "cpu")
    with pytest.raises(NotImplementedError, match="XLA has no element type"):
        lazyxla.from_dlpack(torch.ones(3, dtype=torch.complex32))
    with pytest.raises(TypeError, match="expected an array with __dlpack__, got list"):
        lazyxla.from_dlpack([1, 2])


def test_dlpack_of_the_tensor_itself_is_refused() -> None:
    x = torch.ones(3, device="lazyxla")
    with pytest.raises(ValueError, match="Unknown device type lazyxla"):
        torch.from_dlpack(x)
    with pytest.raises((RuntimeError, BufferError), match="Unsupported device"):
        np.from_dlpack(x)


def test_numpy() -> None:
    x = torch.arange(6.0, device="lazyxla").reshape(2, 3) * 2
    array = lazyxla.host_view(x).numpy()
    assert array.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert np.from_dlpack(lazyxla.host_view(x)).ctypes.data == array.ctypes.data


def test_jax(run_python: Any) -> None:
    code = """
import jax, jax.numpy as jnp, torch, lazyxla
x = torch.arange(64.0, device="lazyxla") + 1
view = lazyxla.host_view(x)
array = jax.dlpack.from_dlpack(view)
assert array.unsafe_buffer_pointer() == view.data_ptr()
result = jnp.sin(array)
y = lazyxla.from_dlpack(result)
assert lazyxla.host_view(y).data_ptr() == result.unsafe_buffer_pointer()
del array, view, result
torch.testing.assert_close(y.cpu(), x.cpu().sin())
assert lazyxla.counters()["uploads"] == 0
"""
    run_python(code, JAX_PLATFORMS="cpu")
