"""Threads that take turns: what one records of a tensor that another has read or written."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazyxla
from tests.support import DEVICE


class Hands:
    """Threads that do one thing at a time, each when it is told to."""

    def __init__(self, count: int) -> None:
        self.queues = [queue.Queue[Callable[[], Any] | None]() for _ in range(count)]
        self.done = queue.Queue[Any]()
        self.threads = [threading.Thread(target=self._work, args=(q,)) for q in self.queues]
        for thread in self.threads:
            thread.start()

    def _work(self, calls: queue.Queue[Callable[[], Any] | None]) -> None:
        while (call := calls.get()) is not None:
            try:
                self.done.put(call())
            except BaseException as error:  # raised in the test's thread
                self.done.put(error)

    def __call__(self, number: int, call: Callable[[], Any]) -> Any:
        self.queues[number].put(call)
        result = self.done.get(timeout=60)
        if isinstance(result, BaseException):
            raise result
        return result

    def __enter__(self) -> Hands:
        return self

    def __exit__(self, *_: object) -> None:
        for calls in self.queues:
            calls.put(None)
        for thread in self.threads:
            thread.join()


def changed(kind: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    if kind == "new":
        return x * 2 - y
    if kind == "in place":
        x.add_(1)
    elif kind == "part":
        x[1:].sub_(y[:3] / 2)
    elif kind == "copied":
        x.copy_(y / 2)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_it_does_not_matter_which_thread_does_what(seed: int) -> None:
    """Tensors that have data are written in place by one thread while another has read them."""
    chance = random.Random(seed)
    ours = [torch.arange(4.0) + i for i in range(3)]
    device = [x.to(DEVICE) for x in ours]
    lazyxla.sync()
    regions: list[Any] = [None] * 3
    with Hands(3) as hand:
        for _ in range(60):
            thread = chance.randrange(3)
            i, j = chance.randrange(len(ours)), chance.randrange(len(ours))
            kinds = ["new", "in place", "in place", "part", "copied", "read", "region"]
            kind = chance.choice(kinds)
            if kind == "region":
                if regions[thread] is None:
                    regions[thread] = lazyxla.step()
                    hand(thread, regions[thread].__enter__)
                else:
                    hand(thread, lambda t=thread: regions[t].__exit__(None, None, None))
                    regions[thread] = None
            elif kind == "read":
                assert hand(thread, device[i].tolist) == ours[i].tolist()
            else:
                made = [
                    changed(kind, ours[i], ours[j]),
                    hand(thread, lambda k=kind, i=i, j=j: changed(k, device[i], device[j])),
                ]
                if made[0] is not None:
                    ours[i], device[i] = made
        for thread, region in enumerate(regions):
            if region is not None:
                hand(thread, lambda r=region: r.__exit__(None, None, None))
    assert [x.tolist() for x in device] == [x.tolist() for x in ours]
