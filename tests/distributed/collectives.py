"""Collectives, one by one and in the modes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import lazyxla
from tests.distributed.cases import case, ranked

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)


@case
def all_reduce(device: str) -> Any:
    results = []
    for dtype in DTYPES:
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            x = ranked(device, 2, 3, dtype=dtype)
            dist.all_reduce(x, getattr(dist.ReduceOp, op))
            results.append(x)
    return results


@case
def all_reduce_bits(device: str) -> Any:
    results = []
    for op in ("BAND", "BOR", "BXOR"):
        x = ranked(device, 5, dtype=torch.int64)
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        results.append(x)
    return results


@case
def sums_of_products(device: str) -> Any:
    """As FSDP2 reduces gradients with a divisor of its own."""
    size = dist.get_world_size()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x, part = ranked(device, 2 * size, dtype=dtype), torch.zeros(2, dtype=dtype, device=device)
        if device == "cpu":  # Gloo has no such sum
            product = x * 0.25
            dist.all_reduce(product)
            results += [product, product.chunk(size)[dist.get_rank()]]
            continue
        for factor in (0.25, torch.tensor([0.25])):
            op: Any = dist._make_nccl_premul_sum(factor)
            y = x.clone()
            dist.all_reduce(y, op)
            dist.reduce_scatter_tensor(part, x, op)
        results += [y, part]
    return results


@case
def all_reduce_mean(device: str) -> Any:
    x = ranked(device, 4)
    if device == "cpu":  # Gloo has no mean
        dist.all_reduce(x)
        return x / dist.get_world_size()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x


@case
def in_views(device: str) -> Any:
    x = ranked(device, 4, 6)

    def exchange(view: Tensor, action: Callable[[Tensor], Any]) -> None:
        if device != "cpu":
            action(view)
            return
        copied = view.contiguous()  # Gloo takes the memory as it lies
        action(copied)
        view.copy_(copied)

    exchange(x[1, ::2], dist.all_reduce)
    exchange(x.t()[2:4], lambda view: dist.broadcast(view, 1))
    exchange(x[2:2], dist.all_reduce)
    scalar = ranked(device)
    dist.all_reduce(scalar)
    return x, scalar


@case
def asynchronous(device: str) -> Any:
    x, y = ranked(device, 3), ranked(device, 3)
    first = dist.all_reduce(x, async_op=True)
    second = dist.broadcast(y, 0, async_op=True)
    future = dist.all_reduce(z := ranked(device, 2), async_op=True).get_future()
    first.wait()
    second.wait()
    assert first.is_completed()
    return x, y, z, future.wait()


@case
def broadcast(device: str) -> Any:
    results = []
    for dtype in (*DTYPES, torch.bool):
        x = ranked(device, 2, 2, dtype=dtype)
        dist.broadcast(x, dist.get_world_size() - 1)
        results.append(x)
    return results


@case
def reduce(device: str) -> Any:
    x = ranked(device, 3)
    dist.reduce(x, 1)
    return x if dist.get_rank() == 1 else None


@case
def gathers(device: str) -> Any:
    size = dist.get_world_size()
    listed = [torch.zeros(2, 3, device=device) for _ in range(size)]
    dist.all_gather(listed, ranked(device, 2, 3))
    whole = torch.zeros(size * 2, 3, device=device)
    dist.all_gather_into_tensor(whole, ranked(device, 2, 3))
    to_root = [torch.zeros(4, device=device) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(ranked(device, 4), to_root, 0)
    return listed, whole, to_root


@case
def scatters(device: str) -> Any:
    size = dist.get_world_size()
    x = torch.zeros(3, device=device)
    parts = [ranked(device, 3) * i for i in range(size)] if dist.get_rank() == 1 else None
    dist.scatter(x, parts, 1)
    y = torch.zeros(2, 2, device=device)
    dist.reduce_scatter_tensor(y, ranked(device, size * 2, 2))
    z = torch.zeros(2, device=device)
    dist.reduce_scatter(z, [ranked(device, 2) * i for i in range(size)])
    return x, y, z


@case
def all_to_all(device: str) -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    even = torch.zeros(size * 2, 3, device=device)
    dist.all_to_all_single(even, ranked(device, size * 2, 3))
    # Process i sends i + j + 1 rows to process j.
    sent, received = [rank + j + 1 for j in range(size)], [i + rank + 1 for i in range(size)]
    uneven = torch.zeros(sum(received), 2, device=device)
    dist.all_to_all_single(uneven, ranked(device, sum(sent), 2), received, sent)
    if device == "cpu":  # Gloo has no lists
        listed = torch.zeros(size, device=device)
        dist.all_to_all_single(listed, ranked(device, size))
        return even, uneven, list(listed.split(1))
    outputs = [torch.zeros(1, device=device) for _ in range(size)]
    dist.all_to_all(outputs, list(ranked(device, size).split(1)))
    return even, uneven, outputs


@case
def in_a_ring(device: str) -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    before, after = (rank - 1) % size, (rank + 1) % size
    x, y, z = (torch.zeros(300, 100, device=device) for _ in range(3))
    # All send first, all receive first, and both at once.
    work = dist.isend(ranked(device, 300, 100), after)
    dist.recv(x, before)
    received = dist.irecv(y, before)
    dist.send(ranked(device, 300, 100) * 2, after)
    received.wait()
    work.wait()
    operations = [
        dist.P2POp(dist.irecv, z, before),
        dist.P2POp(dist.isend, ranked(device, 300, 100) * 3, after),
    ]
    for each in dist.batch_isend_irecv(operations):
        each.wait()
    return x, y, z


@case
def tags(device: str) -> Any:
    """What was started first gets what was sent first under its tag, whoever waits first."""
    results = [torch.zeros(2, device=device) for _ in range(4)]
    if dist.get_rank() == 0:
        for number, tag in enumerate((5, 6, 5, 5)):
            dist.send(ranked(device, 2) * 10**number, 1, tag=tag)
    elif dist.get_rank() == 1:
        works = [dist.irecv(x, 0, tag=tag) for x, tag in zip(results, (6, 5, 5, 5))]
        for work in reversed(works):
            work.wait()
    return results


@case
def objects(device: str) -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.new_group(backend="gloo" if device == "cpu" else "lazyxla")
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, {"rank": rank, "text": "x" * rank}, group=group)
    told = [{"from": rank}]
    dist.broadcast_object_list(told, 1, group=group)
    return repr(everybody), repr(told)


@case
def groups(device: str) -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    backend = "gloo" if device == "cpu" else "lazyxla"
    alone = [dist.new_group([i], backend=backend) for i in range(size)][rank]
    backwards = dist.new_group(list(reversed(range(size))), backend=backend)
    x, y = ranked(device, 3), ranked(device, 3)
    dist.all_reduce(x, group=alone)
    dist.all_reduce(y, group=backwards)
    dist.all_reduce(y)
    dist.destroy_process_group(alone)
    return x, y


@case
def split_groups(device: str) -> Any:
    """As a mesh of two dimensions makes them if `init_process_group` got a `device_id`."""
    size, rank = dist.get_world_size(), dist.get_rank()
    members = [[0], list(range(1, size))]
    x, y = ranked(device, 3), ranked(device, 3)
    if device == "cpu":  # PyTorch splits no groups there
        half = [dist.new_group(of, backend="gloo") for of in members][min(rank, 1)]
    else:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = torch.device(device, 0)
        found = dist.split_group(split_ranks=members, timeout=timedelta(seconds=90))
        world.bound_device_id = None
        assert found is not None
        half = found
        options = half._get_backend(torch.device(device)).options
        assert options._timeout == timedelta(seconds=90)
    dist.all_reduce(x, group=half)
    dist.all_reduce(y)
    return x, y, dist.get_process_group_ranks(half)


@case
def functional_collectives(device: str) -> Any:
    group, size = dist.group.WORLD, dist.get_world_size()
    x = ranked(device, size * 2, 2)
    total = functional.all_reduce(x, "sum", group)
    whole = functional.all_gather_tensor(x, 0, group)
    part = functional.reduce_scatter_tensor(whole, "sum", 0, group)
    coalesced = functional.all_reduce_coalesced([x, x * 2], "max", group)
    sent = functional.all_to_all_single(x, None, None, group)
    return total + 1, whole, part, [c * 1 for c in coalesced], sent.sum(0)


@case
def differentiable(device: str) -> Any:
    x = ranked(device, 3).requires_grad_()
    y = functional.all_gather_tensor_autograd(x * 2, 0, dist.group.WORLD)
    y.square().sum().backward()
    return y.detach(), x.grad


@case
def nobody_reads_it(device: str) -> Any:
    """What is only sent to others is sent all the same."""
    dist.all_reduce(ranked(device, 3))
    x = ranked(device, 3)
    if dist.get_rank() == 0:
        dist.all_reduce(x * 1)
    else:
        dist.all_reduce(x)
    return x if dist.get_rank() else None


@case
def ranks_differ(device: str) -> Any:
    """Process 0 logs, computes something else, and runs its graph at other places."""
    x = ranked(device, 4)
    logged = []
    for number in range(6):
        dist.all_reduce(x)
        x = x / 3
        if dist.get_rank() == 0:
            extra = (x * number).exp().sum()
            logged.append(extra.item())
        elif number % 2 and device != "cpu":
            lazyxla.sync()
    return x


@case
def eager(device: str) -> Any:
    lazyxla.eager_mode(device != "cpu")
    try:
        x = ranked(device, 4)
        dist.all_reduce(x)
        dist.broadcast(y := x * 2 + dist.get_rank(), 1)
        return y - 1
    finally:
        lazyxla.eager_mode(False)


@case
def compiled(device: str) -> Any:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        dist.all_reduce(y)
        return y * 2

    run = function if device == "cpu" else lazyxla.compile(function)
    return [run(ranked(device, size) / 8) for size in (3, 3, 3)]


@case
def traced(device: str) -> Any:
    def function(x: Tensor) -> Tensor:
        y = functional.all_reduce(x.sin(), "sum", dist.group.WORLD) * 2
        dist.all_reduce(y, dist.ReduceOp.MAX)
        parts = x.new_empty(dist.get_world_size() * x.numel())
        dist.all_gather_into_tensor(parts, y.cos() * x)
        return parts + y.sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="lazyxla", fullgraph=True)
    run = function if device == "cpu" else compiled
    return [run(ranked(device, size) / 8) for size in (3, 3, 3)]


def refuses(error: type[Exception], words: str, action: Callable[[], Any]) -> None:
    with pytest.raises(error, match=words):
        action()


@case
def refused(device: str) -> Any:
    if device == "cpu":
        return None
    x = torch.zeros(3, device=device)
    refuses(NotImplementedError, "needs a source", lambda: dist.recv(x))
    size = dist.get_world_size()
    y = torch.zeros(size + 1, device=device)
    refuses(ValueError, "not divisible", lambda: dist.all_to_all_single(y, y.clone()))
    z, rows = torch.zeros(size, device=device), [4] * size
    refuses(ValueError, f"has {size} rows", lambda: dist.all_to_all_single(z, z.clone(), rows))
    refuses(
        ValueError,
        "one process's part has 3",
        lambda: dist.all_gather_into_tensor(torch.zeros(5, device=device), x),
    )
    return None


@case
def barrier(device: str) -> Any:
    x = ranked(device, 3)
    if device == "cpu":
        return x * 2
    y = x * 2
    dist.barrier(device_ids=[0])
    before = lazyxla.counters()["executions"]
    result = y.cpu()
    assert lazyxla.counters()["executions"] == before  # the barrier has run it
    return result
