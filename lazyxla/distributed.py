"""torch.distributed on the device: the process group ``"lazyxla"``.

``torch.distributed.init_process_group("lazyxla")`` makes it; PyTorch also takes it for tensors of
the device if no backend is named. Its collectives are recorded operators
(``csrc/distributed/collectives.h``), which PyTorch's Gloo carries between the processes.
"""

from __future__ import annotations

import functools
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lazyxla import _C, attention_sharding, platforms
from lazyxla.config import settings
from lazyxla.runtime import current_device, platform

NAME = "lazyxla"


def install() -> None:
    """Registers the process group with torch.distributed, if there is a torch.distributed."""
    if dist.is_available():
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=[NAME])
        _let_barriers_name_any_device()


def _let_barriers_name_any_device() -> None:
    """Lets `dist.barrier(device_ids=[LOCAL_RANK])` meet, in groups of the CPU, too.

    PyTorch takes these for devices of the accelerator that is there, used or not, and makes a
    tensor on the first before the group is asked. A group with Gloo alone has no backend for that;
    and each process has devices of its own, where the number of one may be too large. There is no
    hook between the two.
    """
    meet = dist.ProcessGroup.barrier

    @functools.wraps(meet)
    def barrier(group: Any, *args: Any, **kwargs: Any) -> Any:
        for options in (*args, *kwargs.values()):
            if isinstance(options, dist.BarrierOptions):
                _correct_device(group, options)
        return meet(group, *args, **kwargs)

    dist.ProcessGroup.barrier = barrier  # type: ignore[assignment, method-assign]


def _correct_device(group: Any, options: Any) -> None:
    device = options.device
    if device is None or device.type != NAME:
        return
    if all(of_backend.type != NAME for of_backend in group._device_types):
        options.device = torch.device("cpu")
    elif (device.index or 0) >= _C.device_count():
        options.device = torch.device(NAME, current_device())
        options.device_ids = [options.device.index]


def _create(options: Any, _backend_options: Any) -> Any:
    """The process group for torch's `_DistributedBackendOptions`.

    Raises:
        RuntimeError: the devices are in use already, by this process alone.
        ValueError: the process's rank is not in the group, such as one of a wrong ``RANK``.
    """
    if not 0 <= options.group_rank < options.group_size:
        raise ValueError(
            f"lazyxla: rank {options.group_rank} in a group of {options.group_size} processes"
        )
    attention_sharding.install()
    # PyTorch drops the options once the group is registered.
    weakref.finalize(options, _be_default, options.group_id).atexit = False
    store = _shared_by_all(options.store)
    ranks = list(options.global_ranks_in_group or range(options.group_size))
    # The group's own store: after a restart by torchrun nothing in it is of the time before.
    _start_devices(options.store, ranks[options.group_rank], ranks, options.timeout)
    return _C.make_process_group(
        options.store,
        store,
        options.group_id,
        ranks,
        options.group_rank,
        options.timeout,
        settings.compare_collectives,
    )


def _start_devices(store: Any, rank: int, ranks: list[int], timeout: timedelta) -> None:
    """Starts the client: together with the other processes' if it can span them.

    Before a device is used, PyTorch's DeviceMesh makes the one of the number LOCAL_RANK current.
    That is one host's device of several; here each process has devices of its own.
    """
    if len(ranks) == 1 or not platforms.resolve().spans_processes:
        _C.device_count()
        return
    if not _C.initialized():
        if ranks != list(range(len(ranks))):
            raise RuntimeError(
                "lazyxla: the first process group of the device must be of all processes, which "
                f"start their devices together; this one is of the ranks {ranks}"
            )
        platforms.set_processes(rank, len(ranks))
        _C.set_processes(rank, len(ranks), dist.PrefixStore(f"{NAME}/client", store), timeout)
        _C.device_count()
        if _C.client_spans_processes():
            _compare_launches(store, rank, ranks, timeout)
            own_store = dist.PrefixStore(f"{NAME}/heartbeat", store)
            _C.start_heartbeat(own_store, rank, len(ranks), timeout)
        elif platform() != "cpu":
            raise RuntimeError(
                f"lazyxla: the plugin of {platform()} has started this process's devices only; "
                "several processes can share no devices with it"
            )
    elif not _C.client_spans_processes():
        raise RuntimeError(
            "lazyxla: the devices are in use already, by this process alone; call "
            "torch.distributed.init_process_group before anything that uses them"
        )


def _compare_launches(store: Any, rank: int, ranks: list[int], timeout: timedelta) -> None:
    """Makes processes compare programs for devices of several processes before the launch."""

    def connect(ranks: list[int]) -> Any:
        # Whoever waits in a store keeps others from it, and these wait for each other.
        own_store = dist.PrefixStore(f"{NAME}/launches/{ranks}", store.clone())
        return dist.ProcessGroupGloo(own_store, ranks.index(rank), len(ranks), timeout=timeout)

    _C.compare_launches(connect, ranks, store, settings.compare_collectives)


def _be_default(name: Any) -> None:
    """Makes the backend the default one of its group, if the group has no other.

    PyTorch calls the group's default Gloo, which it did not make, if no backend was named, and has
    none if one was named for each device. DDP's logger and the end of the group ask for it.
    """
    try:
        group = dist.distributed_c10d._resolve_process_group(name)
    except (LookupError, RuntimeError):  # it was not made in the end
        return
    if group.name() == "undefined" or {device.type for device in group._device_types} == {NAME}:
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)


def connect(purpose: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The transport between the processes of a new group, which meet at its store."""
    # Some reach this only when others have sent what is only recorded yet.
    _C.sync(False)
    own_store = dist.PrefixStore(f"{NAME}/{purpose}", store)
    return dist.ProcessGroupGloo(own_store, rank, size, timeout=timeout)


def _shared_by_all(store: Any) -> Any:
    """The store behind the prefixes of a group."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
