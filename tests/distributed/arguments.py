"""What c10d's calls are given: dtypes, sizes, strides, lists; and what is refused at the call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import lazyxla
from tests.distributed.cases import case, ranked

MOVED_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16)
"""Gloo has none of them; bytes take their place."""


def exchange(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    dist.all_to_all_single(y, x)
    return y


def gather(x: Tensor) -> Tensor:
    y = x.new_empty((dist.get_world_size() * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(y, x)
    return y


def broadcast(x: Tensor) -> Tensor:
    dist.broadcast(x, dist.get_world_size() - 1)
    return x


@case
def dtypes_that_are_only_moved(device: str) -> Any:
    results = []
    for dtype in MOVED_ONLY:
        for move in (exchange, gather, broadcast):
            x = ranked("cpu", dist.get_world_size(), 2).to(dtype)
            if device == "cpu":
                results.append(move(x.float()))
            else:
                results.append(move(x.to(device)).float())
                assert results[-1].is_floating_point()
    return results


@case
def sums_of_16_bit_integers(device: str) -> Any:
    """They wrap, as those of other integers do."""
    size = dist.get_world_size()
    dtype = torch.int32 if device == "cpu" else torch.int16
    x = (ranked("cpu", 2 * size, dtype=dtype) * 9000).to(device)
    part = torch.empty(2, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(part, x)
    dist.all_reduce(x)
    return [each.to("cpu", torch.int16) for each in (part, x)]


@case
def no_elements(device: str) -> Any:
    size = dist.get_world_size()
    parts = [torch.empty(0, 3, device=device) for _ in range(size)]
    dist.all_gather(parts, torch.empty(0, 3, device=device))
    part = torch.empty(0, 3, device=device)
    dist.reduce_scatter_tensor(part, torch.empty(0, 3, device=device))
    dist.all_reduce(part)
    rows = torch.empty(0, 3, device=device)
    dist.all_to_all_single(rows, part.clone(), [0] * size, [0] * size)
    return [*parts, part, rows, broadcast(part.clone()), exchange(part.clone()), gather(part)]


@case
def parts_of_several_sizes(device: str) -> Any:
    """As NCCL takes them; Gloo takes them in `reduce_scatter` only."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = torch.empty(2 + rank, device=device)
    dist.reduce_scatter(part, [ranked(device, 2 + i) for i in range(size)])
    parts = [torch.empty(2 + i, device=device) for i in range(size)]
    if device == "cpu":
        for i, each in enumerate(parts):
            each.copy_(torch.arange(2.0 + i) % 7 + 1 + i)
    else:
        dist.all_gather(parts, ranked(device, 2 + rank))
    return [part, *parts]


@case
def other_shapes_of_as_many_elements(device: str) -> Any:
    size = dist.get_world_size()
    rows = torch.empty(size, 2, 3, device=device)
    dist.all_to_all_single(rows, ranked(device, size, 6))
    part = torch.empty(2, 3, device=device)
    dist.reduce_scatter_tensor(part, ranked(device, 2 * size, 3))
    return rows, part


@case
def experts(device: str) -> Any:
    """Rows that are exchanged unevenly, there and back, with gradients."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    sent = [(rank + i) % 3 for i in range(size)]
    received = [(i + rank) % 3 for i in range(size)]
    x = ranked(device, sum(sent), 2).requires_grad_()
    weight = (ranked(device, 2, 2) / 8).requires_grad_()
    there = functional.all_to_all_single_autograd(x, received, sent, world)
    back = functional.all_to_all_single_autograd(there @ weight, sent, received, world)
    (back * x.detach()).square().sum().backward()
    return back.detach(), x.grad, weight.grad


@case
def gradients_of_gathered_columns(device: str) -> Any:
    x = ranked(device, 2, 3).requires_grad_()
    y = functional.all_gather_tensor_autograd(x, 1, dist.group.WORLD)
    z = functional.reduce_scatter_tensor_autograd(y.sin(), "sum", 1, dist.group.WORLD)
    (z * ranked(device, 2, 3)).sum().backward()
    return z.detach(), x.grad


Call = Callable[[Tensor, int, int], Any]
"""Of a vector of three numbers, and the rank and size of the group."""


def many(x: Tensor, count: int) -> list[Tensor]:
    return [x.clone() for _ in range(count)]


REFUSED: dict[str, tuple[str, Call]] = {
    "broadcast from nobody": ("invalid root rank", lambda x, r, n: dist.broadcast(x, n)),
    "broadcast from -1": ("invalid root rank", lambda x, r, n: dist.broadcast(x, -1)),
    "reduce": ("invalid root rank", lambda x, r, n: dist.reduce(x, n + 1)),
    "gather": ("invalid root rank", lambda x, r, n: dist.gather(x, None, n + 1)),
    "send to nobody": ("invalid rank", lambda x, r, n: dist.send(x, n)),
    "receive from nobody": ("invalid rank", lambda x, r, n: dist.recv(x, n)),
    "send to itself": ("the same as the rank|to itself", lambda x, r, n: dist.send(x, r)),
    "receive from itself": ("from itself", lambda x, r, n: dist.recv(x, r)),
    "too few results": ("one for each", lambda x, r, n: dist.all_gather(many(x, n - 1), x)),
    "too many results": ("one for each", lambda x, r, n: dist.all_gather(many(x, n + 1), x)),
    "too few results of several": (
        "2 tensors for results were expected",
        lambda x, r, n: dist.group.WORLD.allgather_into_tensor_coalesced([x], many(x, 2)),
    ),
    "too few results of each of several": (
        "2 results of each process were expected",
        lambda x, r, n: dist.group.WORLD.allgather_coalesced([[x]] * n, many(x, 2)),
    ),
    "too few parts of several": (
        "2 tensors for results were expected",
        lambda x, r, n: dist.group.WORLD.reduce_scatter_tensor_coalesced([x], many(x, 2)),
    ),
    "results of another size": (
        "as many elements",
        lambda x, r, n: dist.all_gather(many(x[:2], n), x),
    ),
    "too few to reduce": ("one for each", lambda x, r, n: dist.reduce_scatter(x, many(x, n - 1))),
    "reduced ones of another size": (
        "as many elements",
        lambda x, r, n: dist.reduce_scatter(x, many(x[:2], n)),
    ),
    "too few to exchange": ("one for each", lambda x, r, n: dist.all_to_all([x], [x.clone()])),
    "exchange of two dtypes": (
        "one dtype|different dtypes",
        lambda x, r, n: dist.all_to_all(many(x.double(), n), many(x, n)),
    ),
    "rows of two dtypes": (
        "double received|different dtypes",
        lambda x, r, n: dist.all_to_all_single(x.new_empty(n).double(), x.new_empty(n)),
    ),
    "rows of other sizes": (
        "other numbers of elements",
        lambda x, r, n: dist.all_to_all_single(
            x.new_empty(n, 2), x.new_empty(n, 3), [1] * n, [1] * n
        ),
    ),
    "negative rows": (
        "split sizes",
        lambda x, r, n: dist.all_to_all_single(
            x.clone(), x, [4, -1] + [0] * (n - 2), [4, -1] + [0] * (n - 2)
        ),
    ),
    "bits of floats": ("bit by bit", lambda x, r, n: dist.all_reduce(x, dist.ReduceOp.BAND)),
    "sums of 8-bit floats": (
        "are not reduced",
        lambda x, r, n: dist.all_reduce(x.to(torch.float8_e4m3fn)),
    ),
}


@case
def refused_at_the_call(device: str) -> Any:
    """By each process; nothing is recorded, so that the group goes on."""
    if device == "cpu":
        return None
    x = torch.arange(3.0, device=device)
    lazyxla.sync()
    for words, call in REFUSED.values():
        with pytest.raises(ValueError, match=words):
            call(x, dist.get_rank(), dist.get_world_size())
    before = lazyxla.counters()["comparisons"]
    lazyxla.sync(wait=True)
    assert lazyxla.counters()["comparisons"] == before
    dist.all_reduce(x)
    assert x.tolist() == [i * dist.get_world_size() for i in range(3)]
    return None
