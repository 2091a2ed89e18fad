"""Random programs of collectives, views, in-place writes, reads and syncs, in several groups.

All processes draw the same program; whether one of them reads or syncs in between is its own
choice. The environment's ``RANDOM_PROGRAMS`` says how many programs run, from the one of the number
``FIRST_RANDOM_PROGRAM`` on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lazyxla
from tests.distributed.cases import case

COUNT = int(os.environ.get("RANDOM_PROGRAMS", "20"))
FIRST = int(os.environ.get("FIRST_RANDOM_PROGRAM", "0"))
STEPS = 14
TENSORS = 4
DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.int32)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX)


class Program:
    """One program on tensors of a device, which keeps what it computes."""

    def __init__(self, device: str, seed: int, groups: list[Any]) -> None:
        self.device = device
        self.draw = random.Random(seed)  # the same in all processes
        self.own = random.Random(seed * 1000 + dist.get_rank())
        self.groups = groups
        self.works: list[Any] = []
        self.busy: set[int] = set()
        """Storages that a call uses which no process has waited for."""
        self.results: list[Tensor] = []
        self.tensors = [self.new(self.draw.choice(DTYPES)) for _ in range(TENSORS)]

    def new(self, dtype: torch.dtype) -> Tensor:
        """Of other numbers in each process. Its rows divide by each group's size."""
        shape = (12 * self.draw.randint(1, 2), self.draw.randint(1, 3))
        values = [(i * 5 + self.draw.randint(0, 9) + 3 * dist.get_rank()) % 13 for i in range(7)]
        count = torch.Size(shape).numel()
        x = torch.tensor(values, dtype=dtype).repeat(count // 7 + 1)[:count]
        return x.reshape(shape).to(self.device)

    def run(self) -> list[Tensor]:
        actions = [
            *(self.compute, self.write, self.view, self.forget, self.look, self.wait, self.meet),
            *(self.reduce_all, self.reduce_to_one, self.broadcast, self.gather_all, self.gather),
            *(self.scatter, self.scatter_sums, self.exchange, self.exchange_unevenly),
            *(self.ring, self.send, self.region),
        ]
        for _ in range(STEPS):
            action: Callable[[], None] = self.draw.choice(actions)
            action()
        self.wait()
        return [*self.results, *self.tensors]

    # ---- local ----

    def pick(self) -> Tensor:
        x = self.draw.choice(self.tensors)
        if x.untyped_storage()._cdata in self.busy:
            self.wait()
        return x

    def keep(self, x: Tensor) -> None:
        """A result, which later actions use as well."""
        self.results.append(x)
        if x.dim() == 2 and x.shape[0] % 12 == 0:
            self.tensors[self.draw.randrange(TENSORS)] = x

    def part(self) -> Tensor:
        """Contiguous: a tensor, or some of its rows."""
        x = self.pick().contiguous()
        if self.draw.random() < 0.6:
            return x
        return x[self.draw.randint(0, 2) : self.draw.randint(4, 6)]

    def compute(self) -> None:
        self.tensors[self.draw.randrange(TENSORS)] = (self.pick() * 2 + 1) % 7

    def write(self) -> None:
        x = self.pick()
        self.draw.choice([lambda: x.add_(1), lambda: x[1:3].mul_(2), lambda: x.remainder_(11)])()

    def view(self) -> None:
        x = self.pick()
        if x.is_contiguous():
            views = [x.view(12, -1), x.view(x.shape), x.clone().t().t()]
            self.tensors[self.draw.randrange(TENSORS)] = self.draw.choice(views)

    def wait(self) -> None:
        self.own.shuffle(self.works)
        for work in self.works:
            work.wait()
        self.works.clear()
        self.busy.clear()

    def look(self) -> None:
        """What one process does and others need not."""
        x = self.pick()
        if self.device == "cpu" or self.own.random() < 0.5:
            return
        self.own.choice(
            [lambda: x.sum().item(), lambda: lazyxla.sync(), lambda: lazyxla.sync(wait=True)]
        )()

    def forget(self) -> None:
        self.tensors[self.draw.randrange(TENSORS)] = self.new(self.draw.choice(DTYPES))

    # ---- collectives ----

    def group(self) -> Any:
        return self.draw.choice(self.groups)

    def use(self, *tensors: Tensor) -> None:
        """In a call that is not waited for."""
        self.busy |= {x.untyped_storage()._cdata for x in tensors}

    def start(
        self, call: Callable[..., Any], used: list[Tensor], *args: Any, **kwargs: Any
    ) -> None:
        """A call of the group, waited for at once or later."""
        is_async = self.draw.random() < 0.3
        if is_async:
            self.use(*used)
        work = call(*args, async_op=is_async, **kwargs)
        if is_async:
            self.works.append(work)

    def root(self, group: Any) -> int:
        """Its rank among all."""
        return self.draw.choice(sorted(dist.get_process_group_ranks(group)))

    def reduce_all(self) -> None:
        group, x = self.group(), self.part()
        self.start(dist.all_reduce, [x], x, self.draw.choice(OPS), group=group)
        self.results.append(x)

    def reduce_to_one(self) -> None:
        """Only the root's result is defined."""
        group, x = self.group(), self.part().clone()
        root = self.root(group)
        self.start(dist.reduce, [x], x, root, self.draw.choice(OPS), group=group)
        if dist.get_rank() == root:
            self.results.append(x)

    def broadcast(self) -> None:
        group, x = self.group(), self.part()
        self.start(dist.broadcast, [x], x, self.root(group), group=group)
        self.results.append(x)

    def gather_all(self) -> None:
        group, x = self.group(), self.part()
        size = dist.get_world_size(group)
        if self.draw.random() < 0.5:
            outputs = [torch.zeros_like(x) for _ in range(size)]
            self.start(dist.all_gather, [*outputs, x], outputs, x, group=group)
            self.results += outputs
        else:
            output = x.new_zeros((size * x.shape[0], x.shape[1]))
            self.start(dist.all_gather_into_tensor, [output, x], output, x, group=group)
            self.keep(output)

    def gather(self) -> None:
        group, x = self.group(), self.part()
        root = self.root(group)
        is_root = dist.get_rank() == root
        outputs = [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]
        self.start(dist.gather, [*outputs, x], x, outputs if is_root else None, root, group=group)
        self.results += outputs

    def scatter(self) -> None:
        group, x = self.group(), self.pick()
        root = self.root(group)
        parts = [part.contiguous() for part in x.chunk(dist.get_world_size(group))]
        output = torch.zeros_like(parts[0])
        sent = parts if dist.get_rank() == root else None
        self.start(dist.scatter, [output, *parts], output, sent, root, group=group)
        self.keep(output)

    def scatter_sums(self) -> None:
        group, x = self.group(), self.pick().contiguous()
        size = dist.get_world_size(group)
        parts = [part.contiguous() for part in x.chunk(size)]
        output = torch.zeros_like(parts[0])
        if self.draw.random() < 0.5:
            self.start(
                dist.reduce_scatter,
                [output, *parts],
                output,
                parts,
                self.draw.choice(OPS),
                group=group,
            )
        else:
            self.start(
                dist.reduce_scatter_tensor,
                [output, x],
                output,
                x,
                self.draw.choice(OPS),
                group=group,
            )
        self.keep(output)

    def exchange(self) -> None:
        group, x = self.group(), self.pick().contiguous()
        output = torch.zeros_like(x)
        self.start(dist.all_to_all_single, [output, x], output, x, group=group)
        self.keep(output)

    def exchange_unevenly(self) -> None:
        """Member i sends i + j rows to member j."""
        group, x = self.group(), self.pick()
        size, member = dist.get_world_size(group), dist.get_rank(group)
        rows = [member + j for j in range(size)]
        source = x.new_ones((sum(rows), 2)) * x.flatten()[:2]
        output = torch.zeros_like(source)
        self.start(
            dist.all_to_all_single, [output, source], output, source, rows, rows, group=group
        )
        self.results.append(output)

    def ring(self) -> None:
        """Each sends to the next, all at once, and receives from the one before."""
        x = self.pick().contiguous()
        size, rank = dist.get_world_size(), dist.get_rank()
        y = torch.zeros_like(x)
        tag = self.draw.randint(0, 2)
        operations = [
            dist.P2POp(dist.isend, x, (rank + 1) % size, tag=tag),
            dist.P2POp(dist.irecv, y, (rank - 1) % size, tag=tag),
        ]
        self.use(x, y)
        self.works += dist.batch_isend_irecv(operations)
        self.keep(y)

    def send(self) -> None:
        """From one process to another, which waits at once, or later."""
        x, tag = self.part(), self.draw.randint(0, 2)
        source, target = self.draw.sample(range(dist.get_world_size()), 2)
        is_later = self.draw.random() < 0.5
        y = torch.zeros_like(x)
        self.use(x, y)
        if dist.get_rank() == source:
            self.works.append(dist.isend(x, target, tag=tag))
        elif dist.get_rank() == target:
            work = dist.irecv(y, source, tag=tag)
            assert work is not None
            self.works.append(work) if is_later else work.wait()
        self.results.append(y)

    def region(self) -> None:
        """A compiled one, which gets what is pending and calls the group."""
        group, x = self.group(), self.pick().contiguous()

        def reduced(x: Tensor) -> Tensor:
            y = x + 1
            dist.all_reduce(y, group=group)
            x.add_(y)
            return y % 7

        function = reduced if self.device == "cpu" else lazyxla.compile(reduced)
        self.keep(function(x))

    def meet(self) -> None:
        self.wait()
        group = self.group()
        if self.draw.random() < 0.3:
            dist.barrier(group=group)
        elif self.draw.random() < 0.3:
            numbers: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(numbers, dist.get_rank(), group=group)
            assert numbers == dist.get_process_group_ranks(group)


def groups(device: str) -> list[Any]:
    """All processes; all backwards; each alone; of four the rows and columns of a square."""
    size, rank = dist.get_world_size(), dist.get_rank()
    backend = "gloo" if device == "cpu" else "lazyxla"
    ranks = list(range(size))
    kinds = [[ranks[::-1]], [[i] for i in ranks]]
    if size == 4:
        kinds += [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    found: list[Any] = [dist.group.WORLD, dist.group.WORLD]
    for kind in kinds:
        made = [(members, dist.new_group(members, backend=backend)) for members in kind]
        found += [group for members, group in made if rank in members]
    return found


def programs(device: str) -> list[list[Tensor]]:
    found = groups(device)
    return [Program(device, seed, found).run() for seed in range(FIRST, FIRST + COUNT)]


@case
def random_programs(device: str) -> Any:
    return programs(device)


@case
def random_programs_eager(device: str) -> Any:
    lazyxla.eager_mode(device != "cpu")
    try:
        return programs(device)
    finally:
        lazyxla.eager_mode(False)
