"""Random numbers: seeds and the state of the devices' default generators.

A generator is a seed and a running ordinal (see csrc/dispatch/generator.h). What is drawn depends
on both alone, never on where a recorded graph is cut. ``torch.manual_seed`` seeds these, too.
Nothing here starts a device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lazyxla import _C
from lazyxla.runtime import DeviceLike, device_count, index_of


def default_generator(device: DeviceLike = None) -> torch.Generator:
    """The generator that random operators of a device draw from unless they are given another.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return _C.default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    """Seeds the current device.

    Args:
        seed: an integer of 64 bits, signed or unsigned.
    """
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seeds all devices alike: each then draws the same numbers.

    Args:
        seed: an integer of 64 bits, signed or unsigned.
    """
    seed = int(seed)
    if not -(2**63) <= seed < 2**64:
        raise RuntimeError(f"a seed is a 64-bit integer, got {seed}")
    _C.seed_all(seed % 2**64)  # PyTorch takes negative seeds as their two's complement


def seed() -> int:
    """Seeds the current device at random and returns the seed."""
    return default_generator().seed()


def seed_all() -> int:
    """Seeds all devices at random, alike, and returns the seed."""
    value = seed()
    manual_seed_all(value)
    return value


def initial_seed() -> int:
    """The current device's seed."""
    return default_generator().initial_seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """The state of a device's generator: a CPU uint8 tensor of 16 bytes.

    Args:
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    return default_generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    """Restores a state of a device's generator that :func:`get_rng_state` returned.

    Args:
        state: a CPU uint8 tensor of 16 bytes.
        device: an index, ``"lazyxla:1"``, a ``torch.device``, or None for the current device.
    """
    default_generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators, in device order."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Sets the states of all devices' generators, in device order.

    Args:
        states: a state for each device, see :func:`set_rng_state`.

    Raises:
        IndexError: there are more states than devices. None has been set then.
        TypeError, ValueError: one is no state; none has been set then.
    """
    checked = []
    for index, state in enumerate(states):
        generator = default_generator(index)
        generator.clone_state().set_state(state)
        checked.append((generator, state))
    for generator, state in checked:
        generator.set_state(state)
