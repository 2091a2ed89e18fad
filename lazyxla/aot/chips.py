"""Published peak performance of TPUs, for estimates only."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """Of one device: peak FLOP/s in bfloat16, peak bytes/s from its memory, and the cycles/s of its
    clock, None if unknown."""

    flops_per_second: float
    bytes_per_second: float
    cycles_per_second: float | None


# Per chip, from the tables "Peak compute per chip (bf16)" and "HBM bandwidth per chip" of
# https://docs.cloud.google.com/tpu/docs/v2, v3, v4, v5e, v5p, v6e and tpu7x. Where a chip is two
# devices (libtpu shows the chips of v2, v3, v4 and tpu7x so), a device has half.
#
# Clocks of v2, v3 and v4: N. Jouppi et al., "TPU v4: An Optically Reconfigurable Supercomputer",
# ISCA 2023, and "A Domain-Specific Supercomputer for Training Deep Neural Networks", CACM 2020. Of
# v5e and v5p: what makes the peak of the number of their matrix units, each of which does 128 x 128
# multiplications and additions per cycle (four per core, one core and two).
_CHIPS: dict[str, tuple[float, float, int, float | None]] = {
    "TPU v2": (46e12, 700e9, 2, 0.70e9),
    "TPU v3": (123e12, 900e9, 2, 0.94e9),
    "TPU v4": (275e12, 1200e9, 2, 1.05e9),
    "TPU v5 lite": (197e12, 819e9, 1, 1.50e9),
    "TPU v5": (459e12, 2765e9, 1, 1.75e9),
    "TPU v6 lite": (918e12, 1640e9, 1, None),
    "TPU7x": (2307e12, 7380e9, 2, None),
}


def find_chip(device_kind: str) -> Chip | None:
    """The known data of this model, "TPU v4" for example; None if it is not known."""
    if device_kind not in _CHIPS:
        return None
    flops, bandwidth, devices, clock = _CHIPS[device_kind]
    return Chip(flops / devices, bandwidth / devices, clock)
