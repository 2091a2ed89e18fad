"""The communication between the devices of a partitioned program, as the compiler planned it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lazyxla.aot import hlo
from lazyxla.aot.links import Network

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_IN_PARTS = "async_collective_fusion_config"
"""The TPU compiler's note at each part of a collective that it has split."""


class Grid(NamedTuple):
    """The mesh that a program is partitioned over: its axes and their lengths, and the devices'
    positions among a topology's, row by row."""

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{name}={size}" for name, size in self.axes)


@dataclasses.dataclass(frozen=True)
class Collectives:
    """All collectives of a program of one kind, along the same axes of the mesh."""

    kind: str
    axes: str
    """Names of axes, ``"data"`` or ``"data, model"``; ``"data (2 of 8)"`` for a part of one."""
    count: int
    """How many there are in a run: those in a loop as often as it runs."""
    nbytes: int
    """Bytes of their arrays on one device, all together, whole: after a gather or before a
    scatter."""
    seconds: float | None
    """At the published speed of the links; None if it is not known."""
    overlapped_seconds: float | None
    """The part of it during which the compiler has the device compute."""


class _Found(NamedTuple):
    kind: str
    group: tuple[int, ...]
    axes: str
    nbytes: int
    runs: int
    overlaps: bool


def collectives_of(
    program: hlo.Program, grid: Grid, network: Network | None
) -> tuple[Collectives, ...]:
    """The collectives of a program for the devices of a grid, those that take longest first.

    Args:
        program: as the compiler made it.
        grid: what it was partitioned over.
        network: how the devices are linked, if that is known.
    """
    rows: dict[tuple[str, str], list[_Found]] = {}
    for found in _find(program, grid):
        rows.setdefault((found.kind, found.axes), []).append(found)
    summed = [_sum(all_, grid, network) for all_ in rows.values()]
    return tuple(sorted(summed, key=lambda row: (-(row.seconds or 0), -row.nbytes)))


def _sum(all_: Sequence[_Found], grid: Grid, network: Network | None) -> Collectives:
    seconds = overlapped = None
    if network is not None:
        times = [_seconds(network, grid, found) * found.runs for found in all_]
        seconds = math.fsum(times)
        overlapped = math.fsum(t for t, f in zip(times, all_, strict=True) if f.overlaps)
    count, nbytes = sum(f.runs for f in all_), sum(f.runs * f.nbytes for f in all_)
    return Collectives(all_[0].kind, all_[0].axes, count, nbytes, seconds, overlapped)


def _seconds(network: Network, grid: Grid, found: _Found) -> float:
    group = [grid.devices[position] for position in found.group]
    return network.seconds(found.kind, found.nbytes, group)


def _find(program: hlo.Program, grid: Grid) -> Iterator[_Found]:
    # Collectives that are split over several fusions: their parts, and whether each begins one.
    parts: dict[tuple[str, int], list[tuple[bool, _Found]]] = {}
    scattered = _scattering_fusions(program)
    for number, computation in program.computations.items():
        runs = program.runs[number]
        for instruction in computation.instructions.values():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or not runs:
                continue
            in_parts = _IN_PARTS in instruction.backend_config
            groups = _groups(instruction, len(grid.devices))
            found = _Found(
                "reduce-scatter" if number in scattered and kind == "all-reduce" else kind,
                tuple(groups[0]),
                _axes(kind, grid, groups),
                _nbytes(program, computation, instruction),
                runs,
                in_parts or instruction.opcode.endswith("-start"),
            )
            if not in_parts:
                yield found
            else:
                noted = instruction.backend_config[_IN_PARTS]
                begins = noted.get("flag_start") == "-1"
                parts.setdefault((kind, instruction.channel), []).append((begins, found))
    yield from map(_joined, parts.values())


def _joined(parts: Sequence[tuple[bool, _Found]]) -> _Found:
    """One collective: it runs as often as it begins. Its other parts may be in loops, in which the
    device computes meanwhile."""
    begun = sum(found.runs for begins, found in parts if begins)
    return parts[0][1]._replace(runs=begun or max(found.runs for _, found in parts))


def _scattering_fusions(program: hlo.Program) -> set[int]:
    """Fusions that keep a part only of what they reduce: the TPU's reduce-scatter."""
    scattering = set()
    for computation in program.computations.values():
        for fusion in computation.instructions.values():
            if fusion.opcode != "fusion":
                continue
            inside = program.computations[fusion.called[0]].instructions.values()
            reduced = sum(i.shape.nbytes for i in inside if i.opcode == "all-reduce")
            if fusion.shape.nbytes < reduced:
                scattering.add(fusion.called[0])
    return scattering


def _nbytes(
    program: hlo.Program, computation: hlo.Computation, instruction: hlo.Instruction
) -> int:
    """Of the arrays that are whole on one device."""
    if instruction.opcode == "reduce-scatter":
        return sum(computation.instructions[i].shape.nbytes for i in instruction.operands)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        return instruction.shape.parts[1].nbytes  # (input, output, ...)
    return instruction.shape.nbytes


def _groups(instruction: hlo.Instruction, devices: int) -> list[list[int]]:
    """The groups of positions in the grid that communicate."""
    if "permute" not in instruction.opcode:
        return hlo.device_groups(instruction, devices)
    pairs = hlo.source_target_pairs(instruction)
    return [list(pair) for pair in pairs if pair[0] != pair[1]] or [[0, 0]]


def _axes(kind: str, grid: Grid, groups: Sequence[Sequence[int]]) -> str:
    """The axes along which the positions of a group differ."""
    names, size, stride = [], 1, len(grid.devices)
    for name, length in grid.axes:
        stride //= length
        if any(len({at // stride % length for at in group}) > 1 for group in groups):
            names.append(name)
            size *= length
    is_part = len(groups[0]) < size and kind != "collective-permute"
    return ", ".join(names) + (f" ({len(groups[0])} of {size})" if is_part else "")
