"""Where the device ends: indices out of range, and more memory than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE, counted, error_of


@pytest.fixture
def checked() -> Iterator[None]:
    lazyxla.settings.check_indices = True
    yield
    lazyxla.settings.check_indices = False


def _index(*values: int, device: str = DEVICE) -> torch.Tensor:
    return torch.tensor(values, device=device)


def _table(device: str = DEVICE) -> torch.Tensor:
    return torch.arange(12.0, device=device).view(4, 3)


CALLS: dict[str, Callable[[int, str], torch.Tensor]] = {
    "embedding": lambda i, d: F.embedding(_index(0, i, device=d), _table(d)),
    "index": lambda i, d: _table(d)[_index(0, i, device=d)],
    "index_put": lambda i, d: _table(d).index_put_((_index(i, device=d),), torch.ones(3, device=d)),
    "gather": lambda i, d: _table(d).gather(0, _index(0, i, device=d).view(2, 1)),
    "index_select": lambda i, d: _table(d).index_select(0, _index(i, device=d)),
    "scatter": lambda i, d: _table(d).scatter(0, _index(i, device=d).view(1, 1), 5.0),
    "index_add": lambda i, d: _table(d).index_add(
        0, _index(i, device=d), torch.ones(1, 3, device=d)
    ),
    "embedding_bag": lambda i, d: F.embedding_bag(
        _index(0, i, device=d), _table(d), _index(0, device=d)
    ),
    "take": lambda i, d: _table(d).take(_index(3 * i, device=d)),
    "one_hot": lambda i, d: F.one_hot(_index(i, device=d), 4).float(),
    "nll_loss": lambda i, d: F.nll_loss(_table(d).t(), _index(0, 1, i, device=d)),
    "cross_entropy": lambda i, d: F.cross_entropy(_table(d).t(), _index(0, 1, i, device=d)),
    "masked_scatter": lambda i, d: _table(d).masked_scatter(_table(d) < i, torch.ones(3, device=d)),
    "multinomial": lambda i, d: torch.tensor([1.0, 3.5 - i], device=d).multinomial(1).float(),
    "bernoulli": lambda i, d: torch.tensor([3.5 - i], device=d).bernoulli(),
    "binary_cross_entropy": lambda i, d: F.binary_cross_entropy(
        torch.tensor([3.5 - i], device=d), torch.ones(1, device=d)
    ),
    "target of binary_cross_entropy": lambda i, d: F.binary_cross_entropy(
        torch.full((1,), 0.5, device=d), torch.tensor([i / 3], device=d)
    ),
    "multi_margin_loss": lambda i, d: F.multi_margin_loss(_table(d).t(), _index(0, 1, i, device=d)),
    "multilabel_margin_loss": lambda i, d: F.multilabel_margin_loss(
        _table(d)[:, 0], _index(i, -1, -1, -1, device=d)
    ),
    "max_unpool1d": lambda i, d: F.max_unpool1d(
        _table(d)[:1, :2], _index(0, i, device=d).view(1, 2), 2
    ),
    "max_unpool2d": lambda i, d: F.max_unpool2d(
        _table(d)[:1, :1, None], _index(i, device=d).view(1, 1, 1), 2
    ),
    "max_unpool3d": lambda i, d: F.max_unpool3d(
        _table(d)[:1, :1, None, None], _index(2 * i + 1, device=d).view(1, 1, 1, 1), 2
    ),
    "lengths of segment_reduce": lambda i, d: torch.segment_reduce(
        _table(d)[:, 0], "sum", lengths=_index(1, i, device=d)
    ),
    "pivots of lu_unpack": lambda i, d: torch.lu_unpack(
        torch.ones(3, 3, device=d), _index(1, 2, i, device=d).int()
    )[0],
    "sorter of searchsorted": lambda i, d: torch.searchsorted(
        _table(d)[:, 0], torch.ones(1, device=d), sorter=_index(0, 1, 2, i, device=d)
    ),
    "offsets of embedding_bag": lambda i, d: F.embedding_bag(
        _index(0, 1, 2, device=d), _table(d), _index(0, i, device=d)
    ),
    "first of embedding_bag": lambda i, d: F.embedding_bag(
        _index(0, 1, 2, device=d), _table(d), _index(i - 3, 2, device=d)
    ),
}
# PyTorch checks the classes itself where it knows the device, by reading them.
OTHER_WORDS = ("one_hot",)


@pytest.mark.parametrize("name", CALLS)
def test_checked_values_raise_at_the_call(name: str, checked: None) -> None:
    """What only the data tell is an error of the CPU's type in the CPU's words."""
    kind, text = error_of(CALLS[name], 4, "cpu")
    assert kind in (IndexError, RuntimeError)
    ours = error_of(CALLS[name], 4, DEVICE)
    assert ours[0] is kind
    assert name in OTHER_WORDS or ours[1] == text


def test_checked_indices_may_count_from_the_end(checked: None) -> None:
    def call(device: str) -> torch.Tensor:
        return _table(device).index_fill(0, _index(-1, device=device), 5.0)

    torch.testing.assert_close(call(DEVICE).cpu(), call("cpu"))
    assert error_of(lambda: _table().index_fill(0, _index(-5), 5.0))[0] is IndexError


def test_a_wrong_result_tensor_is_refused_before_wrong_values(checked: None) -> None:
    def call(device: str) -> torch.Tensor:
        out = torch.empty(2, dtype=torch.double, device=device)
        return torch.multinomial(torch.tensor([-1.0, 2, 3], device=device), 2, out=out)

    assert error_of(call, DEVICE) == error_of(call, "cpu")


@pytest.mark.parametrize("places", [(4,), (-1,), (2**40,), (-(2**40), 4)])
def test_unchecked_writes_out_of_range_are_left_out(places: tuple[int, ...]) -> None:
    """One place is written as a slice, several by a scatter."""
    ones = torch.ones(len(places), 3, device=DEVICE)
    written = _table().index_copy_(0, _index(*places), ones)
    torch.testing.assert_close(written.cpu(), _table("cpu"), rtol=0, atol=0)
    beyond = _index(*(place if place > 0 else place - 4 for place in places))
    written = _table().index_put_((beyond,), ones)
    torch.testing.assert_close(written.cpu(), _table("cpu"), rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
def test_right_indices_pass_the_check(name: str, checked: None) -> None:
    assert torch.isfinite(CALLS[name](3, DEVICE).cpu()).all()


def test_checking_counts_from_the_end_where_pytorch_does(checked: None) -> None:
    torch.testing.assert_close(_table()[_index(-4)].cpu(), torch.tensor([[0.0, 1.0, 2.0]]))
    with pytest.raises(IndexError, match="index -5 is out of bounds"):
        _table()[_index(-5)]
    with pytest.raises(IndexError, match="index out of range in self"):
        F.embedding(_index(-1), _table())


def test_without_the_check_reads_clamp_and_writes_are_left_out() -> None:
    torch.testing.assert_close(_table()[_index(9)].cpu(), torch.tensor([[9.0, 10.0, 11.0]]))
    written = _table().index_put_((_index(9),), torch.full((3,), -1.0, device=DEVICE))
    torch.testing.assert_close(written.cpu(), torch.arange(12.0).view(4, 3))


def test_without_the_check_nothing_is_read() -> None:
    table, index = _table(), _index(1, 2)
    lazyxla.sync()
    with counted() as n:
        rows = table[index]
    assert (n.executions, n.downloads) == (0, 0)
    assert rows.shape == (2, 3)


def test_out_of_memory_is_pytorchs_error_and_the_device_survives() -> None:
    kept = torch.ones(3, device=DEVICE)
    lazyxla.sync()
    huge = torch.empty(1 << 46, device=DEVICE) + 1
    with pytest.raises(torch.OutOfMemoryError, match="lazyxla: out of device memory"):
        lazyxla.sync()
    with pytest.raises(RuntimeError, match=r"this value was not computed.*out of device memory"):
        huge.sum().item()
    torch.testing.assert_close((kept + 1).cpu(), torch.full((3,), 2.0))


def test_errors_of_tensors_larger_than_the_host_are_worded_without_making_them() -> None:
    x, y = (torch.empty(n, device=DEVICE) for n in (1 << 40, (1 << 40) + 1))
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(1099511627776\) must match"):
        x + y
    with pytest.raises(RuntimeError, match="1099511627777"):
        x.add_(y)
