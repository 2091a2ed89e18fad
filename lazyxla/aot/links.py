"""How fast chips of a TPU slice talk to each other at best, as published: for estimates only."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Links:
    """Of one model of TPU: what a link between two neighbours carries in one direction, and from
    which length on a direction of a slice is closed to a ring (a multiple of `ring`)."""

    bytes_per_second: float
    ring: int


# Per link and direction. v5e, v6e: the ICI bandwidth of the tables on
# https://docs.cloud.google.com/tpu/docs/v5e and v6e (1600 and 3200 Gbit/s a chip in one direction)
# over its four ports. v5p, tpu7x: the bidirectional one of docs/v5p and docs/tpu7x (1200 GB/s a
# chip) over its six links and two directions. v4: N. Jouppi et al., "TPU v4: An Optically
# Reconfigurable Supercomputer", ISCA 2023 (six links of 50 GB/s). Slices of v4, v5p and tpu7x are
# made of cubes of 4 x 4 x 4 chips and are closed to rings in directions that are whole cubes; those
# of v5e and v6e only at the whole pod's length, 16.
_LINKS: dict[str, Links] = {
    "TPU v4": Links(50e9, ring=4),
    "TPU v5 lite": Links(50e9, ring=16),
    "TPU v5": Links(100e9, ring=4),
    "TPU v6 lite": Links(100e9, ring=16),
    "TPU7x": Links(100e9, ring=4),
}

Place = tuple[int, ...]
"""Where a chip is in its slice, in each direction."""


def find_links(device_kind: str) -> Links | None:
    """The known links of this model, "TPU v5" for example; None if they are not known."""
    return _LINKS.get(device_kind)


@dataclasses.dataclass(frozen=True)
class Network:
    """The chips of a slice and the links between them."""

    links: Links
    places: tuple[Place, ...]
    """Of each device."""

    @property
    def extents(self) -> Place:
        """How many chips the slice has in each direction."""
        return tuple(max(of_all) + 1 for of_all in zip(*self.places))

    def seconds(self, kind: str, nbytes: int, group: Sequence[int]) -> float:
        """How long a collective takes at least, among a group of devices at the same time as in all
        other groups.

        Directions of the slice along which the group extends are used together, with all their
        links: two a chip where the group closes a ring, one where it does not. Nothing is counted
        for latency, for other traffic on the same links, nor among the devices of one chip.

        Args:
            kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"`` or
                ``"collective-permute"``, which is taken to be between neighbours.
            nbytes: of the array on one device, whole: as it is gathered, before it is scattered.
            group: positions in :attr:`places`.
        """
        if kind == "collective-permute":
            return nbytes / self.links.bytes_per_second
        rates = self._rates(group)
        if not rates:
            return 0.0
        if kind == "all-to-all":
            # Half of everything crosses the middle of each direction.
            return max(nbytes * extent / 4 / rate for extent, rate in rates)
        times = 2 if kind == "all-reduce" else 1  # a reduce-scatter and an all-gather
        moved = times * nbytes * (len(group) - 1) / len(group)
        return moved / math.fsum(rate for _, rate in rates)

    def _rates(self, group: Sequence[int]) -> list[tuple[int, float]]:
        """Of each direction along which the group extends: how many chips, and bytes/s."""
        rates = []
        for along, size in zip(zip(*(self.places[i] for i in group)), self.extents, strict=True):
            extent = len(set(along))
            if extent == 1:
                continue
            is_ring = extent == size and size % self.links.ring == 0
            rates.append((extent, self.links.bytes_per_second * (2 if is_ring else 1)))
        return rates
