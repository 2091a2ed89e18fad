"""Where the device ends: indices out of range, and more memory than there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional as F

import lazyxla
from tests.support import DEVICE, counted


@pytest.fixture
def checked() -> Iterator[None]:
    lazyxla.settings.check_indices = True
    yield
    lazyxla.settings.check_indices = False


def _index(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def _table() -> torch.Tensor:
    return torch.arange(12.0, device=DEVICE).view(4, 3)


CALLS: dict[str, Callable[[int], torch.Tensor]] = {
    "embedding": lambda i: F.embedding(_index(0, i), _table()),
    "index": lambda i: _table()[_index(0, i)],
    "index_put": lambda i: _table().index_put_((_index(i),), torch.ones(3, device=DEVICE)),
    "gather": lambda i: _table().gather(0, _index(0, i).view(2, 1)),
    "index_select": lambda i: _table().index_select(0, _index(i)),
    "scatter": lambda i: _table().scatter(0, _index(i).view(1, 1), 5.0),
    "index_add": lambda i: _table().index_add(0, _index(i), torch.ones(1, 3, device=DEVICE)),
}


@pytest.mark.parametrize("name", CALLS)
def test_checked_indices_raise_at_the_call(name: str, checked: None) -> None:
    with pytest.raises(IndexError, match="index 4 is out of bounds for dimension 0 with size 4"):
        CALLS[name](4)


@pytest.mark.parametrize("name", CALLS)
def test_right_indices_pass_the_check(name: str, checked: None) -> None:
    assert torch.isfinite(CALLS[name](3).cpu()).all()


def test_checking_counts_from_the_end_where_pytorch_does(checked: None) -> None:
    torch.testing.assert_close(_table()[_index(-4)].cpu(), torch.tensor([[0.0, 1.0, 2.0]]))
    with pytest.raises(IndexError, match="index -5 is out of bounds"):
        _table()[_index(-5)]
    with pytest.raises(IndexError, match="index -1 is out of bounds"):
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
