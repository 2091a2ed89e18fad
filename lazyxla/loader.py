"""Batches on the device ahead of their use: the :class:`DeviceLoader`.

One thread per iteration takes batches from the loader and uploads them while the program computes:

    consumer: iter(loader) ── take ──────────── take ─────────── take ──> raise or end
                  │            ▲ wait if none     ▲
    thread:       └─> next(loader), upload, next(loader), upload, wait for room, ...

An upload records no operator, so the batches are leaves of the recorded graphs, and the thread
flushes nothing. The thread drops a batch before it is taken: then only the program itself keeps it
alive.
"""

from __future__ import annotations

import atexit
import copy
import dataclasses
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lazyxla import _C
from lazyxla.runtime import BACKEND, DeviceLike, index_of
from lazyxla.spmd import Sharding, shard, shard_local

ShardingOf = Sharding | Callable[[torch.Tensor], Sharding]


class DeviceLoader:
    """Iterates over a loader's batches on a device, uploading them ahead on a background thread.

        for images, labels in lazyxla.DeviceLoader(loader):
            loss = F.cross_entropy(model(images), labels)

    Every batch is copied as ``x.to(device)`` copies each of its tensors: dtypes, shapes and strides
    are the loader's. Tuples, lists, dicts, named tuples and other containers of PyTorch's pytree
    are traversed, dataclasses field by field; objects with a method ``to`` (such as
    ``PackedSequence``) are moved by ``to(device)``, all others passed on.

    Each iteration makes an iterator of the loader in the calling thread, but takes the batches from
    it in the background, with the caller's grad mode. An exception of the loader is raised where
    its batch would have come, and ends the iteration. Leaving an iteration early stops its thread,
    which waits for the batch that the loader is at.

    ``lazyxla.counters()["loader_waits"]`` counts the batches that were not ready when they were
    needed; the first of an iteration usually is one of them. If it grows with every step, the
    loader is slower than the program.

    Args:
        loader: a ``DataLoader`` or any other iterable of batches.
        device: the device to copy to; without an index the caller's current one.
        prefetch: how many uploaded batches may wait, at least 1. Each takes its memory on the
            device; one more may wait on the host.
        buckets: pads each batch in the background, before its upload, so that the device sees few
            shapes: a :class:`Buckets`, or any other function from a batch to a pair. What the
            iteration gives is then that pair, ``(batch, mask)``, with the mask on the device, too.
            Its errors are raised like the loader's.
        sharding: spreads each tensor over many devices, each getting its part only: a
            :class:`Sharding`, whose spec is cut for tensors of fewer dimensions, or a function from
            a tensor to one.
        local: with ``sharding``, each process's batches are its devices' part of the whole, as
            :func:`shard_local` takes it. Without it every process loads the same whole batches.

    Raises:
        ValueError: ``prefetch`` is less than 1, the device of another type, or ``local`` without
            ``sharding``.
        IndexError: there is no such device.
        TypeError: ``prefetch`` is no integer, or ``buckets`` or ``sharding`` is none of these; by
            ``len``, if the loader has no length.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: DeviceLike = BACKEND,
        prefetch: int = 2,
        buckets: Callable[[Any], tuple[Any, Any]] | None = None,
        sharding: ShardingOf | None = None,
        local: bool = False,
    ) -> None:
        prefetch = operator.index(prefetch)
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, got {prefetch}")
        if buckets is not None and not callable(buckets):
            raise TypeError(f"buckets must be a lazyxla.Buckets, got {type(buckets).__name__}")
        if sharding is not None and not (isinstance(sharding, Sharding) or callable(sharding)):
            raise TypeError(f"sharding must be a lazyxla.Sharding, got {type(sharding).__name__}")
        if local and sharding is None:
            raise ValueError("local needs a sharding, which says what each process has a part of")
        index_of(device)
        self.loader = loader
        self.device = device
        self.prefetch = prefetch
        self.buckets = buckets
        self.sharding = sharding
        self.local = local

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        device = torch.device(BACKEND, index_of(self.device))
        move = _mover(device, self.sharding, self.local)
        return _taken(_Uploads(iter(self.loader), move, self.prefetch, self.buckets))


def _taken(uploads: _Uploads) -> Iterator[Any]:
    uploads.start()
    try:
        while uploads.wait():
            yield uploads.take()
    finally:
        uploads.stop()


_END = object()


class _Uploads:
    """The uploads of one iteration. The consumer and the thread share it.

    Each batch is in a list of its own, from which the consumer takes it: the thread never keeps a
    batch alive that the consumer has, so a program can take over its memory as soon as the consumer
    drops it.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        move: Move,
        prefetch: int,
        buckets: Callable[[Any], tuple[Any, Any]] | None,
    ) -> None:
        self._batches = batches
        self._buckets = buckets
        self._move = move
        self._prefetch = prefetch
        self._ready: deque[list[Any]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        self._grad = torch.is_grad_enabled()
        # A daemon, for the interpreter would wait for all others before _stop_all can stop them.
        self._thread = threading.Thread(target=self._run, name="lazyxla-loader", daemon=True)

    def start(self) -> None:
        _running.add(self)
        self._thread.start()

    def wait(self) -> bool:
        """Waits for a batch; False if there is none any more. Raises what the loader raised."""
        with self._changed:
            waits = not self._ready and not self._ended
            self._changed.wait_for(lambda: self._ready or self._ended)
            if self._ready:
                if waits:
                    _C.count_loader_wait()
                return True
        if self._error is not None:
            raise self._error
        return False

    def take(self) -> Any:
        """The batch that was waited for."""
        with self._changed:
            batch = self._ready.popleft()
            self._changed.notify_all()  # there is room now
        return batch.pop()

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread, for at most `timeout` seconds, and forgets what it has uploaded."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():  # a garbage collection may call it there
            self._thread.join(timeout)
        self._ready.clear()
        self._error = None  # its traceback refers to this object
        _running.discard(self)

    def _run(self) -> None:
        try:
            with torch.set_grad_enabled(self._grad):
                while self._upload_next():
                    pass
        except BaseException as error:
            self._error = error
        del self._batches  # what it holds, such as worker processes, ends here
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _upload_next(self) -> bool:
        """Uploads a batch, once there is room for it; False if none is left or wanted."""
        batch = next(self._batches, _END)
        if batch is _END:
            return False
        if self._buckets is not None:
            batch = self._buckets(batch)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._prefetch)
            if self._stopped:
                return False
        uploaded = [_upload(batch, self._move)]
        with self._changed:
            self._ready.append(uploaded)
            self._changed.notify_all()
        return True


def _moves(x: Any) -> bool:
    return callable(getattr(x, "to", None)) and not isinstance(x, type)


Move = Callable[[Any], Any]
"""Moves one tensor, or other object with a method ``to``, to where it is to be."""


def _mover(device: torch.device, sharding: ShardingOf | None, local: bool) -> Move:
    if sharding is None:
        return lambda x: x.to(device)

    def spread(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x.to(device)
        mesh, spec = sharding(x) if callable(sharding) else sharding
        if local:
            return shard_local(x, mesh, spec[: x.dim()])
        return shard(torch.empty_like(x, device=device), mesh, spec[: x.dim()]).copy_(x)

    return spread


def _upload(batch: Any, move: Move) -> Any:
    """The batch with its tensors on the device."""

    def upload(leaf: Any) -> Any:
        if _moves(leaf):
            return move(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        result = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                value = _upload(getattr(leaf, field.name), move)
                object.__setattr__(result, field.name, value)  # frozen ones, too
        return result

    return tree_map(upload, batch, is_leaf=_moves)


_running: weakref.WeakSet[_Uploads] = weakref.WeakSet()


def _stop_all() -> None:
    """At exit: a thread that the interpreter's end catches within C++ would end in an abort."""
    for uploads in list(_running):
        uploads.stop(timeout=5)


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_running.clear)  # a child has none of the threads
