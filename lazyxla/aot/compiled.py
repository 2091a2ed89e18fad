"""What the compiler made of a program, and what it tells about it."""

from __future__ import annotations

import functools
import re
from typing import Any

from lazyxla.aot.chips import Chip
from lazyxla.lowering import optimized

_GIB = 2**30


class CompiledProgram:
    """A program compiled for one device of a :class:`Topology`. ``print`` shows a table.

    What is said of memory is what the program will take. What is said of time is an estimate: the
    compiler's cost model and the published peaks of the device, without waiting for input, for the
    host, or for other devices.
    """

    def __init__(
        self, raw: Any, target: str, memory_bytes: int | None = None, chip: Chip | None = None
    ) -> None:
        self._raw = raw
        self._chip = chip
        self.target = target
        self.memory_bytes = memory_bytes
        self.num_parameters: int | None = None

    @property
    def num_outputs(self) -> int:
        """How many arrays the program returns."""
        return self._raw.num_outputs

    def memory_stats(self) -> dict[str, int]:
        """Bytes on one device: ``arguments``, ``outputs``, ``aliased`` (arguments whose memory
        outputs take over), ``temporary``, ``generated_code`` and ``peak``.

        Empty if the compiler does not tell.
        """
        return self._raw.memory_stats()

    @property
    def fits(self) -> bool | None:
        """Whether ``peak`` is within the device's memory; None if the compiler does not tell.

        A program that is far too large is refused when it is compiled.
        """
        peak = self.memory_stats().get("peak", 0)
        return peak <= self.memory_bytes if peak and self.memory_bytes else None

    def cost_analysis(self) -> dict[str, Any]:
        """The compiler's estimates, for example ``"flops"``, ``"bytes accessed"`` and
        ``"optimal_seconds"``."""
        return self._raw.cost_analysis()

    @property
    def flops(self) -> float | None:
        """Floating-point operations of one run, as the compiler counts them."""
        return self.cost_analysis().get("flops")

    @property
    def bytes_accessed(self) -> float | None:
        """Bytes that its operations read and write in one run, as the compiler counts them."""
        return self.cost_analysis().get("bytes accessed")

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The sum of what the compiler's cost model gives to the operations that it made, in cycles
        of the device's clock. None if it gives nothing.

        The body of a loop counts once, and an operation that it knows no time for does not count.
        """
        cycles = [int(found) for found in _CYCLES.findall(optimized.serialized(self._raw))]
        return sum(number for number in cycles if number != _UNKNOWN) or None

    @property
    def least_seconds(self) -> float | None:
        """What :attr:`flops` and :attr:`bytes_accessed` take at the device's published peaks, the
        longer of both. None if its peaks are not known.

        The compiler counts bytes that never leave the chip, too: it can be too long.
        """
        if self._chip is None or self.flops is None or self.bytes_accessed is None:
            return None
        compute = self.flops / self._chip.flops_per_second
        return max(compute, self.bytes_accessed / self._chip.bytes_per_second)

    @property
    def estimated_seconds(self) -> float | None:
        """The time of one run. An estimate, not a measurement.

        It is that of :attr:`estimated_cycles` where the clock of the device is known, but no less
        than :attr:`least_seconds`. (Of the compiler's own sum, ``"optimal_seconds"``, nothing can
        be made: it contains -1 s for each operation that it has no time for.)
        """
        clock = self._chip and self._chip.cycles_per_second
        cycles = self.estimated_cycles
        by_cycles = cycles / clock if cycles and clock else 0.0
        return max(by_cycles, self.least_seconds or 0.0) or None

    @property
    def share_of_peak_flops(self) -> float | None:
        """:attr:`flops` in :attr:`estimated_seconds`, as a share of the device's peak in bfloat16.

        An estimate of an estimate: good for comparing two forms of a program.
        """
        return self._share(self.flops, self._chip and self._chip.flops_per_second)

    @property
    def share_of_peak_bandwidth(self) -> float | None:
        """:attr:`bytes_accessed` in :attr:`estimated_seconds`, as a share of the memory's peak."""
        return self._share(self.bytes_accessed, self._chip and self._chip.bytes_per_second)

    def _share(self, amount: float | None, peak: float | None) -> float | None:
        seconds = self.estimated_seconds
        return amount / (seconds * peak) if amount and peak and seconds else None

    def serialize(self) -> bytes:
        """The program in the compiler's own format, which the same version of it reads."""
        return self._raw.serialize()

    def optimized_hlo(self) -> str:
        """What the compiler made of the program: HLO after all of its passes, as text.

        Raises:
            RuntimeError: the compiler does not tell, or in a form that the installed jaxlib, which
                turns it into text, does not know.
        """
        return optimized.module(self._raw).to_string()  # type: ignore[no-any-return]

    def __str__(self) -> str:
        memory = self.memory_stats()
        rows = [(name.replace("_", " "), _size(memory[name])) for name in _ROWS if name in memory]
        if "peak" in memory:
            rows.append(("peak memory", _size(memory["peak"]) + self._verdict()))
        rows += [("FLOPs", _count(self.flops)), ("bytes accessed", _size(self.bytes_accessed))]
        if self.estimated_seconds is not None:
            least = "at least " if self.estimated_seconds == self.least_seconds else ""
            rows.append(("estimated time", least + _seconds(self.estimated_seconds)))
        rows += self._shares()
        if self.num_parameters is not None:
            rows.insert(0, ("parameters", f"{self.num_parameters:,}"))
        lines = [f"  {name:<26}{value}" for name, value in rows if value]
        return "\n".join([f"Program for one device of {self.target}", *lines])

    def _verdict(self) -> str:
        if self.fits is None or self.memory_bytes is None:
            return ""
        verdict = "fits" if self.fits else "does not fit"
        return f" of {_size(self.memory_bytes)}: {verdict}"

    def _shares(self) -> list[tuple[str, str]]:
        if self._chip is None:
            return []
        shares = []
        if (share := self.share_of_peak_flops) is not None:
            peak = self._chip.flops_per_second / 1e12
            shares.append(("share of peak compute", f"{share:.1%} of {peak:g} TFLOP/s (bfloat16)"))
        if (share := self.share_of_peak_bandwidth) is not None:
            peak = self._chip.bytes_per_second / 1e9
            shares.append(("share of peak bandwidth", f"{share:.1%} of {peak:g} GB/s"))
        return shares


# What the TPU's compiler notes beside each operation.
_CYCLES = re.compile(rb'"estimated_cycles":"(\d+)"')

_UNKNOWN = 2**63 - 1

_ROWS = ("arguments", "outputs", "aliased", "temporary", "generated_code")


def _size(count: float | None) -> str:
    if count is None:
        return ""
    for unit, scale in (("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def _count(count: float | None) -> str:
    if count is None:
        return ""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f}"


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.2f} {unit}"
    return f"{seconds / 1e-6:.2f} us"
