"""Tables of what the compiler reports of one program, or of several for comparison."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lazyxla.aot.compiled import CompiledProgram

_MEMORY = ("arguments", "outputs", "aliased", "temporary", "generated_code")


def table(program: CompiledProgram) -> str:
    """All that is known of a program, a line for each."""
    lines = [f"  {name:<26}{value}" for name, value in _rows(program) if value]
    return "\n".join([_title(program), *lines, *_precision_note(program), *_collectives(program)])


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Programs beside each other: ``print`` shows a table with a column for each."""

    programs: tuple[CompiledProgram, ...]

    def __str__(self) -> str:
        columns = [dict(_rows(program)) for program in self.programs]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = [("", *(program.mesh or "one device" for program in self.programs))]
        if len({program.target for program in self.programs}) > 1:
            rows.append(("topology", *(program.target for program in self.programs)))
        rows += [(name, *(column.get(name, "") for column in columns)) for name in names]
        kinds = dict.fromkeys((c.kind, c.axes) for p in self.programs for c in p.collectives)
        for kind, axes in kinds:
            cells = []
            for program in self.programs:
                found = [c for c in program.collectives if (c.kind, c.axes) == (kind, axes)]
                cells.append(_summary(found[0].count, found[0].seconds) if found else "")
            rows.append((f"{kind} over {axes}", *cells))
        return aligned(rows)


def aligned(rows: list[tuple[str, ...]]) -> str:
    """The rows with their cells below each other."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _title(program: CompiledProgram) -> str:
    if program.mesh is None:
        return f"Program for one device of {program.target}"
    return f"Program for the mesh {program.mesh} of {program.target}; for each device:"


def _rows(program: CompiledProgram) -> list[tuple[str, str]]:
    memory = program.memory_stats()
    rows = []
    if program.num_parameters is not None:
        rows.append(("parameters", f"{program.num_parameters:,}"))
    rows += [(name.replace("_", " "), size(memory[name])) for name in _MEMORY if name in memory]
    if "peak" in memory:
        rows.append(("peak memory", size(memory["peak"]) + _verdict(program)))
    rows.append(("FLOPs", _count(program.flops)))
    if share := _share_at_highest_precision(program):
        rows.append(("float32 products", f'{share:.1%} of the FLOPs, at "highest" precision'))
    rows.append(("bytes accessed", size(program.bytes_accessed)))
    return rows + _times(program) + _shares(program)


def _share_at_highest_precision(program: CompiledProgram) -> float:
    """Of a TPU's program; 0 for other devices, which have float32 of their own."""
    if program.chip is None or not program.flops:
        return 0.0
    return min(program.highest_precision_flops / program.flops, 1.0)


def _precision_note(program: CompiledProgram) -> list[str]:
    """What to do about float32 matmuls that take several times as long as they might."""
    if not _share_at_highest_precision(program):
        return []
    return [
        '  ("highest" is PyTorch\'s default: each such product is 6 in bfloat16. With',
        '  torch.set_float32_matmul_precision("high") it is 3, with "medium" one, as by default in',
        "  JAX; or compute in bfloat16, by torch.autocast or a model in it.)",
    ]


def _times(program: CompiledProgram) -> list[tuple[str, str]]:
    compute, whole = program.compute_seconds, program.estimated_seconds
    least = "at least " if compute is not None and compute == program.least_seconds else ""
    rows = []
    if program.mesh is not None:
        rows.append(("compute time", least + seconds(compute)))
        if program.network_seconds is not None:
            overlapped = seconds(program.overlapped_seconds)
            rows.append(("network time", f"{seconds(program.network_seconds)}, {overlapped} of it "
                         "while computing"))  # fmt: skip
    if whole is not None:
        rows.append(("estimated time", least + seconds(whole)))
    return rows


def _verdict(program: CompiledProgram) -> str:
    if program.fits is None or program.memory_bytes is None:
        return ""
    verdict = "fits" if program.fits else "does not fit"
    return f" of {size(program.memory_bytes)}: {verdict}"


def _shares(program: CompiledProgram) -> list[tuple[str, str]]:
    chip, shares = program.chip, []
    if chip is None:
        return []
    if (share := program.share_of_peak_flops) is not None:
        peak = chip.flops_per_second / 1e12
        shares.append(("share of peak compute", f"{share:.1%} of {peak:g} TFLOP/s (bfloat16)"))
    if (share := program.share_of_peak_bandwidth) is not None and program.mesh is None:
        peak = chip.bytes_per_second / 1e9
        shares.append(("share of peak bandwidth", f"{share:.1%} of {peak:g} GB/s"))
    return shares


def _collectives(program: CompiledProgram) -> list[str]:
    """A line for each kind and axis."""
    if not program.collectives:
        return []
    rows: list[tuple[str, ...]] = [("  collective", "axes", "count", "bytes", "time")]
    for each in program.collectives:
        time = seconds(each.seconds)
        rows.append((f"  {each.kind}", each.axes, f"{each.count}", size(each.nbytes), time))
    unknown = program.unknown_loops
    note = [f"  (loops of unknown length count once: {', '.join(unknown)})"] if unknown else []
    return [*aligned(rows).split("\n"), *note]


def _summary(count: int, time: float | None) -> str:
    return f"{count}" if time is None else f"{count} in {seconds(time)}"


def size(count: float | None) -> str:
    """Bytes in the largest unit that fits; nothing for None."""
    return _in_units(count, {" GiB": 2**30, " MiB": 2**20, " KiB": 2**10}, f"{count or 0:.0f} B")


def seconds(time: float | None) -> str:
    """A time in the largest unit that fits; nothing for None."""
    return _in_units(time, {" s": 1.0, " ms": 1e-3}, f"{(time or 0) / 1e-6:.2f} us")


def _count(count: float | None) -> str:
    return _in_units(count, {" T": 1e12, " G": 1e9, " M": 1e6}, f"{count or 0:.0f}")


def _in_units(value: float | None, units: dict[str, float], smaller: str) -> str:
    """In the first unit that fits, or as `smaller` has it; nothing for None."""
    if value is None:
        return ""
    for unit, scale in units.items():
        if value >= scale:
            return f"{value / scale:.2f}{unit}"
    return smaller
