"""Storages: set_, resize_, growing, slices and .data; conjugate and negative views of them."""

from __future__ import annotations

import io

import pytest
import torch
from torch.utils._mode_utils import no_dispatch

import lazyxla
from tests.support import DEVICE, assert_same, check, counted, numbers, on_device

pytestmark = pytest.mark.cuda


def test_set_and_resize():
    def use(x):
        y = x.new_zeros(0)
        y.set_(x.untyped_storage(), 6, (2, 3), (6, 1))
        y.add_(1)
        z = x.clone()
        z.resize_(2, 3).mul_(2)
        w = x.clone().resize_(3, 2)
        u = x.new_zeros(2).set_(z)
        u.add_(10)
        return [x, y, z, w, u]

    check(use, numbers(4, 6))


class _Wrapper(torch.Tensor):
    """A tensor that has another one, and no memory."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(
            cls, wrapped.shape, strides=wrapped.stride(), dtype=wrapped.dtype, device=wrapped.device
        )

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return NotImplemented


def test_set_of_a_storage_without_memory() -> None:
    """So subclasses make their views share a storage: PyTorch's checks of gradients do."""
    first = _Wrapper(torch.ones(2, 3, device=DEVICE))
    second = _Wrapper(torch.ones(3, 2, device=DEVICE))
    with no_dispatch():
        second.set_(torch.ops.aten.t.default(first))
    assert second.stride() == (1, 3)
    assert second.untyped_storage()._cdata == first.untyped_storage()._cdata


def test_growing_keeps_the_content():
    x = on_device(numbers(4, 6))
    x.resize_(5, 6)
    assert_same(x[:4], numbers(4, 6))
    x.fill_(1)
    assert x.sum().item() == 30
    y = on_device(numbers(4, 6))[1]
    y.resize_(18)
    assert_same(y[:18], numbers(4, 6).view(-1)[6:])


def test_storage_resize():
    x = on_device(numbers(4, 6))
    storage = x.untyped_storage()
    assert storage.nbytes() == 96
    storage.resize_(0)
    assert storage.nbytes() == 0
    lazyxla.sync()
    storage.resize_(96)
    x.copy_(numbers(4, 6))
    assert_same(x * 2, numbers(4, 6) * 2)


def test_slices_of_storages_are_refused():
    """They share bytes at an address within, which a storage here does not have."""
    storage = on_device(numbers(4, 6)).untyped_storage()
    with pytest.raises(NotImplementedError, match="a slice of a storage does not exist"):
        storage[2:5]
    assert storage[3] == numbers(4, 6).untyped_storage()[3]
    assert storage.tolist() == numbers(4, 6).untyped_storage().tolist()


def test_resizing_to_nothing_frees_memory():
    x = torch.ones(1024, device=DEVICE)
    lazyxla.sync()
    before = lazyxla.memory_allocated()
    x.untyped_storage().resize_(0)
    assert before - lazyxla.memory_allocated() == 4096


def test_data_assignment():
    x = on_device(numbers(4, 6))
    y = x
    x.data = on_device(numbers(2, 2)) + 1
    assert_same(y * 1, numbers(2, 2) + 1)
    x.data.zero_()
    assert_same(y, torch.zeros(2, 2))


def test_conjugate_views():
    def use(z):
        c = z.conj()
        imag = c.imag
        assert c.is_conj()
        assert imag.is_neg()
        results = [c + z, c.clone(), c.resolve_conj(), imag + 1, imag.resolve_neg(), c.mT @ z]
        c.mul_(2)
        imag.add_(1)
        c[0] = 1j
        z.conj().copy_(z.mT.clone())
        return [*results, z, torch.view_as_real(c.resolve_conj())]

    check(use, torch.complex(numbers(3, 3), numbers(3, 3).flip(0) + 2))


def test_reading_conjugates():
    z = torch.complex(numbers(2, 3), numbers(2, 3) + 1)
    ours = on_device(z)
    assert torch.equal(ours.conj().cpu(), z.conj())
    assert torch.equal(ours.conj().imag.cpu(), z.conj().imag)
    assert ours.conj()[1, 2].item() == z.conj()[1, 2].item()
    assert_same(torch.empty_like(ours).copy_(z.conj()), z.conj().resolve_conj())


MEMORIES = {
    "rows": lambda d: torch.arange(6.0, device=d).reshape(2, 3),
    "columns": lambda d: torch.arange(6.0, device=d).reshape(2, 3).t(),
    "channels last": lambda d: (
        torch.arange(48.0, device=d).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
    ),
    "bfloat16": lambda d: torch.arange(6.0, device=d).bfloat16(),
    "bool": lambda d: torch.tensor([True, False, True], device=d),
    "complex": lambda d: torch.arange(4.0, device=d) * (1 + 2j),
    "bytes": lambda d: torch.arange(5, dtype=torch.uint8, device=d),
    "a part": lambda d: torch.arange(12.0, device=d).reshape(3, 4)[1:, ::2],
    "no dimension": lambda d: torch.tensor(3.0, device=d),
    "empty": lambda d: torch.empty(0, 3, device=d),
}


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize("pending", [False, True])
def test_saving_runs_no_program(name: str, pending: bool) -> None:
    """Bytes of a memory are read as the elements they are; only what is pending is run."""
    theirs, ours = (MEMORIES[name](d) for d in ("cpu", DEVICE))
    lazyxla.sync()
    if pending:
        ours.copy_(~ours.isnan())
        theirs.copy_(~theirs.isnan())
    with counted() as n:
        saved = io.BytesIO()
        torch.save({"x": ours, "again": ours}, saved)
    assert n.executions == n.flushes == int(pending and ours.numel() > 0)
    saved.seek(0)
    loaded = torch.load(saved, map_location="cpu")
    torch.testing.assert_close(loaded["x"], theirs, rtol=0, atol=0, check_stride=True)
    assert loaded["x"].untyped_storage().data_ptr() == loaded["again"].untyped_storage().data_ptr()
    saved.seek(0)
    assert_same(torch.load(saved)["x"], theirs)
    assert bytes(ours.untyped_storage().cpu()) == bytes(loaded["x"].untyped_storage())


def test_bytes_are_spread_over_what_they_are_copied_to() -> None:
    ours = torch.tensor([True], device=DEVICE).view(torch.uint8)
    assert torch.zeros(4, dtype=torch.uint8).copy_(ours).tolist() == [1, 1, 1, 1]
    assert torch.zeros(2, 1, dtype=torch.uint8).copy_(ours).tolist() == [[1], [1]]
    assert torch.zeros(2, dtype=torch.float32).copy_(ours).tolist() == [1.0, 1.0]
