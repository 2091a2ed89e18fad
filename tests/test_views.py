"""Views share memory: every view operator, alone and under writes, against the CPU."""

from __future__ import annotations

import pytest
import torch

import lazyxla
from tests.support import DEVICE, assert_same, check, counted, error_of, on_device

pytestmark = pytest.mark.cuda


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 11 - 5).to(dtype).reshape(shape)


VIEWS = {
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "mT": lambda x: x.mT,
    "select": lambda x: x[1],
    "select_last": lambda x: x.select(-1, -2),
    "slice": lambda x: x[:, 1:3],
    "slice_step": lambda x: x[..., ::3],
    "slice_empty": lambda x: x[:, 2:2],
    "slices": lambda x: x[1:, ::2, 1:5:2],
    "expand": lambda x: x.unsqueeze(1).expand(4, 2, 3, 6),
    "expand_new": lambda x: x.expand(2, 4, 3, 6),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(),
    "squeeze_dims": lambda x: x[:1, :1].squeeze((0, 1)),
    "narrow": lambda x: x.narrow(2, 1, 4),
    "split": lambda x: x.split(4, -1),
    "split_sizes": lambda x: x.split([1, 2, 3], 2),
    "chunk": lambda x: x.chunk(4, 2),
    "tensor_split": lambda x: x.tensor_split(4, 2),
    "unbind": lambda x: x.unbind(1),
    "unfold": lambda x: x.unfold(2, 3, 3),
    "unfold_overlapping": lambda x: x.unfold(2, 3, 1),
    "diagonal": lambda x: x.diagonal(),
    "diagonal_of_others": lambda x: x.diagonal(1, 2, 1),
    "as_strided": lambda x: x.as_strided((3, 4), (5, 2), 7),
    "as_strided_overlapping": lambda x: x.as_strided((5, 4), (1, 2), 3),
    "view": lambda x: x.view(2, 2, 9, 2),
    "view_merge": lambda x: x.view(-1, 6),
    "reshape": lambda x: x.mT.reshape(4, 18),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 3)),
    "movedim": lambda x: x.movedim(0, -1),
    "swapdims": lambda x: x.swapdims(0, 1),
    "detach": lambda x: x.detach(),
    "view_as": lambda x: x.view_as(x),
    "all_of_it": lambda x: x[...],
    "none": lambda x: x[None, :, None],
    "heads": lambda x: x.view(4, 3, 2, 3).transpose(1, 2).select(0, 2),
    "chain": lambda x: x.transpose(0, 1)[1:].unflatten(2, (2, 3))[..., ::2].movedim(0, 2)[None],
    "view_int32": lambda x: x.view(torch.int32),
    "view_int16": lambda x: x.view(torch.int16),
    "view_int64": lambda x: x.view(torch.int64),
    "view_uint8_part": lambda x: x[1].view(torch.uint8)[..., 1::2],
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 3, 3, 2)),
    "real_of_complex": lambda x: torch.view_as_complex(x.view(4, 3, 3, 2)).imag,
}


@pytest.mark.parametrize("name", VIEWS)
def test_reading(name):
    """The view's geometry is PyTorch's, and a computation reads through it."""
    x = numbers(4, 3, 6)
    ours, theirs = VIEWS[name](on_device(x)), VIEWS[name](x)
    assert_same(ours, theirs)
    for ours_part, theirs_part in zip(*map(torch.utils._pytree.tree_leaves, (ours, theirs))):
        assert ours_part.storage_offset() == theirs_part.storage_offset()
        assert_same(ours_part == ours_part, theirs_part == theirs_part)
        assert_same(ours_part.clone(), theirs_part.clone())


OVERLAPPING = {"expand", "expand_new", "unfold_overlapping", "as_strided_overlapping"}
COPIES = {"reshape"}


@pytest.mark.parametrize("name", sorted(VIEWS.keys() - OVERLAPPING - COPIES))
@pytest.mark.parametrize("computed", [True, False], ids=["computed", "pending"])
def test_writing(name, computed):
    """A write through the view is seen by its base and by other views of it, and by no copy."""

    def write(x):
        x = x + 0
        if computed:
            lazyxla.sync()
        view, copy, other = VIEWS[name](x), x.clone(), x.mT
        for part in view if isinstance(view, tuple | list) else [view]:
            part.mul_(2)
            part.fill_(part.numel())
        return x, view, copy, other

    check(write, numbers(4, 3, 6))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16])
def test_writing_other_dtypes(dtype):
    def write(x):
        x[..., 1::2] = x[..., ::2]
        x.mT[0].fill_(1)
        return x, x.view(torch.uint8)

    check(write, numbers(4, 6, dtype=dtype))


def test_complex():
    def write(z):
        torch.view_as_real(z)[..., 0].mul_(3)
        z.imag.add_(1)
        z.T[1] = 2 - 1j
        return z, z.real, z.conj() * z, z.mT.conj().imag

    check(write, torch.complex(numbers(3, 3), numbers(3, 3).flip(0)))


def test_bits_of_floats():
    def flip_sign(x):
        x.view(torch.int32).bitwise_xor_(-(2**31))
        x[1:].view(torch.uint8).view(-1, 4)[:, :2] = 0
        return x

    check(flip_sign, numbers(4, 6) / 3)


@pytest.mark.parametrize(
    ("dtype", "other"),
    [
        (torch.float64, torch.float32),
        (torch.float64, torch.int64),
        (torch.int16, torch.bfloat16),
        (torch.float16, torch.int16),
        (torch.uint8, torch.bool),
        (torch.int8, torch.uint8),
        (torch.complex64, torch.int64),
        (torch.complex128, torch.float64),
        (torch.float32, torch.complex64),
    ],
)
def test_bits_are_kept(dtype, other):
    """Looking at bits as another type and back changes none of them."""
    x = numbers(2, 4).abs().remainder(2).to(dtype)
    check(lambda x: x.view(other).clone().view(dtype), x)
    check(lambda x: x.view(other).clone(), x)


def test_channels_last():
    def use(x):
        y = x.contiguous(memory_format=torch.channels_last)
        y[:, 1].zero_()
        y.permute(0, 2, 3, 1).flatten(1)[:, :5] = 7
        return y, y + x, y * 2, y.contiguous(), y.to(memory_format=torch.contiguous_format)

    check(use, numbers(2, 3, 4, 5))


def test_writes_reach_all_views_of_a_storage():
    def use(x):
        rows, columns, flat = x.unbind(0), x.unbind(1), x.view(-1)
        rows[0].add_(columns[0][:2].sum())
        flat[3:9].copy_(x.flatten()[12:18].clone())
        columns[2].mul_(-1)
        x.t().diagonal().fill_(9)
        return x, rows, columns, flat

    check(use, numbers(4, 6))


def test_version_counters():
    def versions(x):
        x = x + 0
        y, z = x[1:], x.detach()
        y.add_(1)
        x.view(-1)[2:].zero_()
        torch.add(x, x, out=x)
        z.copy_(x * 2)
        x.t_()
        x.normal_()
        x[x > 0] = 1
        x.resize_(2, 2)
        return [t._version for t in (x, y, z, x.T)]

    x = numbers(3, 4)
    assert versions(on_device(x)) == versions(x)


def test_aliasing_is_visible():
    x = on_device(numbers(3, 4))
    assert x.T.untyped_storage().data_ptr() == x[1:].untyped_storage().data_ptr()
    assert x[1:].data_ptr() - x.data_ptr() == 16
    assert x._is_view() is False
    assert x[1:]._base is x
    assert x.clone().data_ptr() != x.data_ptr()
    assert x.T.is_set_to(x.T)
    assert not x.is_set_to(x.T)


def test_metadata_in_place():
    def use(x):
        y = x[:]
        y.transpose_(0, 1).unsqueeze_(0).add_(1)
        y.squeeze_(0).t_()
        x.as_strided_((2, 2), (6, 1), 1).mul_(3)
        return x, y

    check(use, numbers(4, 6))


PARTS_WRITTEN = {
    "select_scatter": lambda x: torch.select_scatter(x, torch.ones_like(x[0]), 0, 1),
    "slice_scatter": lambda x: torch.slice_scatter(x, torch.ones_like(x[:, 1:]), 1, 1),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, torch.ones_like(x.diagonal())),
}


@pytest.mark.parametrize("name", PARTS_WRITTEN)
def test_a_copy_with_another_part_keeps_gaps(name):
    def use(x):
        return PARTS_WRITTEN[name](x[::2, 1::2].T)

    assert use(numbers(4, 6)).stride() == (2, 12)
    check(use, numbers(4, 6))


def test_a_chain_of_views_is_one_node():
    x = on_device(numbers(4, 6))
    lazyxla.sync()

    def chain(x):
        return x.view(2, 2, 6).transpose(0, 2)[1:].unsqueeze(0).narrow(1, 1, 3).mT[..., 1:]

    y = chain(x)
    with counted() as n:
        z = y * 2
        lazyxla.sync()
    assert (n.compiles, n.nodes_lowered) == (1, 2)
    assert_same(z, chain(numbers(4, 6)) * 2)


def test_views_alone_compile_nothing():
    x = on_device(numbers(4, 6))
    lazyxla.sync()
    with counted() as n:
        views = [x.T, x[1], x[:, ::2], x.expand(2, 4, 6), x.view(torch.int32), x.unfold(0, 2, 1)]
        lazyxla.sync()
        for view, expected in zip(views, [numbers(4, 6).T, numbers(4, 6)[1]]):
            assert_same(view, expected)
    assert (n.compiles, n.executions, n.nodes_recorded) == (0, 0, 0)


def test_reading_parts_of_a_large_tensor():
    """A part of a large storage is cut out on the device; only the part travels."""
    x = torch.arange(2**19, dtype=torch.int64).reshape(2**9, 2**10)
    y = on_device(x)
    assert_same(y[3, ::512], x[3, ::512])
    assert_same(y[::7, 5], x[::7, 5])
    assert y[5, 77].item() == x[5, 77]
    assert_same(y.T[1:3], x.T[1:3])


WRONG = {
    "view": lambda x: x.T.view(-1),
    "view_size": lambda x: x.view(5, 5),
    "reshape": lambda x: x.reshape(5, -1),
    "select": lambda x: x.select(0, 4),
    "select_dim": lambda x: x.select(2, 0),
    "index": lambda x: x[4],
    "too_many_indices": lambda x: x[0, 0, 0],
    "narrow": lambda x: x.narrow(0, 2, 3),
    "expand": lambda x: x.expand(3, 6),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(0),
    "permute_twice": lambda x: x.permute(0, 0),
    "unsqueeze": lambda x: x.unsqueeze(4),
    "squeeze": lambda x: x.squeeze(3),
    "split": lambda x: x.split([1, 2]),
    "chunk": lambda x: x.chunk(0),
    "unfold": lambda x: x.unfold(0, 5, 1),
    "unfold_step": lambda x: x.unfold(0, 2, 0),
    "diagonal": lambda x: x.diagonal(0, 1, 1),
    "as_strided": lambda x: x.as_strided((5, 5), (6, 1)),
    "as_strided_negative": lambda x: x.as_strided((2, 2), (-1, 1)),
    "step": lambda x: x[::-1],
    "view_dtype": lambda x: x[:, :3].view(torch.int64),
    "view_dtype_strided": lambda x: x.T.view(torch.int64),
    "view_as_complex": torch.view_as_complex,
    "view_as_real": torch.view_as_real,
    "t": lambda x: x[None].t(),
    "movedim": lambda x: x.movedim((0, 1), (0,)),
    "flatten": lambda x: x.flatten(1, 0),
    "unflatten": lambda x: x.unflatten(1, (4, 4)),
    "write_expanded": lambda x: x[:1].expand(4, 6).add_(1),
    "copy_to_expanded": lambda x: x[:1].expand(4, 6).copy_(x),
    "overlap_in_part": lambda x: x.view(-1)[1:].add_(x.view(-1)[:-1]),
    "copy_overlapping": lambda x: x.view(-1)[1:].copy_(x.view(-1)[:-1]),
    "out_overlaps": lambda x: torch.add(x.view(-1)[1:], 1, out=x.view(-1)[:-1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_pytorchs(name):
    kind, text = error_of(WRONG[name], numbers(4, 6))
    assert kind is not type(None)
    assert error_of(WRONG[name], on_device(numbers(4, 6))) == (kind, text)


def test_a_view_keeps_its_storage_alive():
    view = torch.arange(6.0, device=DEVICE)[2:4]
    lazyxla.sync()
    before = lazyxla.memory_allocated()
    assert view.tolist() == [2, 3]
    del view
    assert before - lazyxla.memory_allocated() == 24


def test_bits_written_narrow_and_read_wide():
    """Two conversions of different width in a row, which XLA's CPU plugin may merge wrongly."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.view(torch.int16)[0] = 1
        return x.view(torch.int32) + 0

    check(function, torch.arange(6).reshape(2, 3))
