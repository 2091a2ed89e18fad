"""A compiled program, and what the compiler reports about it."""

from __future__ import annotations

import functools
import math
from typing import Any

from lazyxla.aot import flops, hlo, report
from lazyxla.aot.chips import Chip
from lazyxla.aot.collectives import Collectives, Grid, collectives_of
from lazyxla.aot.links import Network
from lazyxla.lowering import optimized


class CompiledProgram:
    """A program compiled for one device of a :class:`Topology`, or for all devices of a mesh.
    ``print`` shows a table.

    What is said of memory is what the program will take on each device. What is said of time is an
    estimate: the compiler's cost model and the published peaks of the device and of its links,
    without waiting for input or for the host. All numbers are of one device.
    """

    def __init__(
        self,
        raw: Any,
        target: str,
        memory_bytes: int | None = None,
        chip: Chip | None = None,
        grid: Grid | None = None,
        network: Network | None = None,
    ) -> None:
        self._raw = raw
        self._chip = chip
        self._grid = grid
        self._network = network
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

        Empty if the compiler does not report it.
        """
        return self._raw.memory_stats()

    @property
    def fits(self) -> bool | None:
        """Whether ``peak`` is within the device's memory; None if the compiler does not report it.

        A program that is far too large is refused when it is compiled.
        """
        peak = self.memory_stats().get("peak", 0)
        return peak <= self.memory_bytes if peak and self.memory_bytes else None

    def cost_analysis(self) -> dict[str, Any]:
        """The compiler's estimates, for example ``"flops"``, ``"bytes accessed"`` and
        ``"optimal_seconds"``."""
        return self._raw.cost_analysis()

    @property
    def mesh(self) -> str | None:
        """The axes of the mesh that the program is partitioned over, ``"data=8, model=2"``; None if
        it is for one device."""
        return None if self._grid is None else str(self._grid)

    @property
    def chip(self) -> Chip | None:
        """The published peaks of the device; None if they are not known."""
        return self._chip

    @property
    def unknown_loops(self) -> list[str]:
        """Loops whose trip counts the program does not state; they count once."""
        return self._optimized.unknown_loops

    @functools.cached_property
    def _optimized(self) -> hlo.Program:
        return hlo.Program(optimized.serialized(self._raw))

    @functools.cached_property
    def flops(self) -> float | None:
        """Floating-point operations of one run, as the compiler counts them; matmuls in loops count
        once per iteration."""
        counted = self.cost_analysis().get("flops")
        return counted + flops.repeated(self._optimized) if counted else counted

    @functools.cached_property
    def highest_precision_flops(self) -> int:
        """Those of :attr:`flops` that are float32 matmuls at the highest precision, which is
        PyTorch's default (``torch.set_float32_matmul_precision``).

        A TPU computes each by 6 matmuls in bfloat16; by 3 at "high", by one at "medium".
        """
        return flops.at_highest_precision(self._optimized)

    @property
    def bytes_accessed(self) -> float | None:
        """Bytes that its operations read and write in one run, as the compiler counts them. The
        body of a loop counts once."""
        return self.cost_analysis().get("bytes accessed")

    @functools.cached_property
    def estimated_cycles(self) -> int | None:
        """The sum of what the compiler's cost model gives to the operations that it made, in cycles
        of the device's clock. None if it gives nothing.

        The body of a loop counts as often as the loop runs, if the program states that. An
        operation that it knows no time for does not count; nor do collectives.
        """
        program, total = self._optimized, 0
        for number, computation in program.computations.items():
            calls = program.calls[number]
            times = program.runs[number] // calls if calls else 1
            for instruction in computation.instructions.values():
                total += (instruction.estimated_cycles or 0) * times
        return total or None

    @functools.cached_property
    def collectives(self) -> tuple[Collectives, ...]:
        """The devices' communication, by kind and by axes of the mesh, those that take longest
        first. Empty for one device."""
        if self._grid is None:
            return ()
        return collectives_of(self._optimized, self._grid, self._network)

    @property
    def network_seconds(self) -> float | None:
        """The time of all :attr:`collectives` at the published speed of the links, without latency.
        None if it is not known."""
        times = [each.seconds for each in self.collectives]
        return None if None in times else math.fsum(t for t in times if t is not None)

    @property
    def overlapped_seconds(self) -> float:
        """The part of :attr:`network_seconds` during which the device computes, as the compiler has
        arranged it."""
        return math.fsum(each.overlapped_seconds or 0 for each in self.collectives)

    @property
    def least_seconds(self) -> float | None:
        """The longer of the times that :attr:`flops` and :attr:`bytes_accessed` take at the
        device's published peaks. None if its peaks are not known.

        The compiler counts bytes that never leave the chip, too: it can be too long. Of a
        partitioned program it counts what is gathered several times: there it is what the FLOPs
        take, if the clock of the device is known.
        """
        if self._chip is None or self.flops is None or self.bytes_accessed is None:
            return None
        compute = self.flops / self._chip.flops_per_second
        if self._grid is not None and self._chip.cycles_per_second:
            return compute
        return max(compute, self.bytes_accessed / self._chip.bytes_per_second)

    @property
    def compute_seconds(self) -> float | None:
        """The time that one device computes in a run. An estimate, not a measurement.

        It is that of :attr:`estimated_cycles` where the clock of the device is known, but no less
        than :attr:`least_seconds`. (Of the compiler's own sum, ``"optimal_seconds"``, nothing can
        be made: it contains -1 s for each operation that it has no time for.)
        """
        clock = self._chip and self._chip.cycles_per_second
        cycles = self.estimated_cycles
        by_cycles = cycles / clock if cycles and clock else 0.0
        return max(by_cycles, self.least_seconds or 0.0) or None

    @property
    def estimated_seconds(self) -> float | None:
        """The time of one run. An estimate, not a measurement.

        Of a program for one device it is :attr:`compute_seconds`. Of a partitioned one it is the
        longer of that and :attr:`overlapped_seconds`, plus the collectives that the compiler does
        not overlap with computation; None if the speed of the links is not known.
        """
        compute, network = self.compute_seconds, self.network_seconds
        if self._grid is None or compute is None:
            return compute
        if network is None:
            return None
        overlapped = self.overlapped_seconds
        return max(compute, overlapped) + network - overlapped

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
        """The optimized program: HLO after all of the compiler's passes, as text.

        Raises:
            RuntimeError: the compiler does not return it, or in a form that the installed jaxlib,
                which turns it into text, does not know.
        """
        return optimized.module(self._raw).to_string()  # type: ignore[no-any-return]

    def compare(self, *others: CompiledProgram) -> report.Comparison:
        """This program beside others: ``print`` shows a table with a column for each.

        Args:
            others: compiled programs.

        Raises:
            TypeError: something else than a compiled program is given.
        """
        for other in others:
            if not isinstance(other, CompiledProgram):
                raise TypeError(f"compare() takes compiled programs, not {other!r}")
        return report.Comparison((self, *others))

    def __str__(self) -> str:
        return report.table(self)
