"""Training steps of whole models as the TPU's compiler sees them, beside the same steps written by
hand in JAX: compiled for one v5e by the same libtpu, without a TPU.

    python benchmarks/tpu.py --models decoder --dtypes bfloat16 --by-category

Prints the compiler's estimated cycles, the bytes that its operations access and the temporary
memory of both, and lazyxla's over JAX's. Kernels, scatters and sorts, of which the compiler
estimates no cycles, are counted apart. float32 products have the same precision on both sides
(``--precision``). Needs the TPU's compiler, and minutes of it for each model.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import jax  # noqa: E402
import torch  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import lazyxla  # noqa: E402
from benchmarks import tpu_jax_networks, tpu_torch  # noqa: E402
from benchmarks.plan_jax import Executable  # noqa: E402
from lazyxla.aot import hlo  # noqa: E402
from lazyxla.aot.compiled import CompiledProgram  # noqa: E402
from lazyxla.aot.report import aligned  # noqa: E402

TOPOLOGY = "v5e:1x1"
OPTIONS = {"xla_tpu_enable_flash_attention": False}
"""Without it the compiler makes kernels of some softmaxes, of which it then estimates nothing."""
PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}
"""JAX's name of each precision of float32 products, by PyTorch's."""

# What an operation is, by the first of these that it contains.
CATEGORIES = {
    "products": ("dot", "convolution"),
    "kernels": ("custom-call",),
    "scatter, sort": ("scatter", "sort"),
    "gather": ("gather", "dynamic-slice"),
    "reductions": ("reduce", "reduce-window", "select-and-scatter"),
}
LAYOUT = {
    *("parameter", "constant", "bitcast", "copy", "transpose", "reshape", "slice", "tuple"),
    *("broadcast", "get-tuple-element", "fusion", "concatenate", "pad", "copy-start", "copy-done"),
    *("convert", "slice-start", "slice-done", "async-start", "async-done"),
}


def by_torch(model: str, dtype: str, layers: int | None, attention: str) -> CompiledProgram:
    """The step in PyTorch, by lazyxla."""
    training = tpu_torch.training(model, dtype, layers)
    with tpu_torch.attention_by(attention):
        return lazyxla.aot.compile(
            training.model,
            training.inputs,
            topology=TOPOLOGY,
            train_step=training.step,
            options=OPTIONS,
        )


def by_jax(model: str, dtype: str, layers: int | None, precision: str) -> CompiledProgram:
    """The step in JAX, with the report that lazyxla makes of any program."""
    target = lazyxla.aot.topology(TOPOLOGY)
    device = topologies.get_topology_desc(TOPOLOGY, "tpu").devices[0]
    with jax.enable_x64(False), jax.default_matmul_precision(PRECISIONS[precision]):
        training = tpu_jax_networks.training(model, dtype, layers)
        everywhere = jax.sharding.SingleDeviceSharding(device)
        step = jax.jit(
            training.step, donate_argnums=0, in_shardings=everywhere, out_shardings=everywhere
        )
        compiled = step.lower(training.state, *training.inputs).compile(OPTIONS)
    return CompiledProgram(
        Executable(compiled), f"{target}, by JAX", target.memory_bytes, target.chip
    )


def category(program: hlo.Program, instruction: hlo.Instruction) -> str:
    """What an operation is, all that is fused into it considered."""
    found = _opcodes(program, instruction)
    for name, opcodes in CATEGORIES.items():
        if not found.isdisjoint(opcodes):
            return name
    return "copies, layouts" if found <= LAYOUT else "element-wise"


def _opcodes(program: hlo.Program, instruction: hlo.Instruction) -> set[str]:
    found = {instruction.opcode}
    for called in instruction.called:
        for inner in program.computations[called].instructions.values():
            found |= _opcodes(program, inner)
    return found


def cycles_by_category(plan: CompiledProgram) -> Counter[str]:
    """The compiler's estimated cycles."""
    program, total = plan._optimized, Counter[str]()
    for number, computation in program.computations.items():
        for instruction in computation.instructions.values():
            if cycles := instruction.estimated_cycles:
                runs = program.runs[number] // max(program.calls[number], 1)
                total[category(program, instruction)] += cycles * runs
    return total


def unestimated(plan: CompiledProgram) -> int:
    """How many kernels, scatters, and sorts run, of which the compiler estimates no cycles."""
    program = plan._optimized
    fused = {
        called
        for computation in program.computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "fusion"
        for called in instruction.called
    }
    return sum(
        program.runs[number]
        for number, computation in program.computations.items()
        if number not in fused
        for instruction in computation.instructions.values()
        if _computes(instruction) and not instruction.estimated_cycles
    )


def _computes(instruction: hlo.Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return bool(instruction.raw.get(28) == b"tpu_custom_call")  # others are names of nothing
    if instruction.opcode == "fusion":
        return bool(instruction.raw.get(11) == b"kCustom")
    return instruction.opcode in ("scatter", "select-and-scatter", "sort")


FIGURES: dict[str, Callable[[CompiledProgram], float]] = {
    "Mcycles": lambda plan: (plan.estimated_cycles or 0) / 1e6,
    "GB": lambda plan: (plan.bytes_accessed or 0) / 1e9,
    "temporary MiB": lambda plan: plan.memory_stats()["temporary"] / 2**20,
}


def rows_of(title: tuple[str, ...], ours: CompiledProgram, theirs: CompiledProgram) -> list[Any]:
    """One line of the table."""
    cells = []
    for of in FIGURES.values():
        a, b = of(ours), of(theirs)
        cells += [f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}"]
    return [*title, *cells, str(unestimated(ours)), str(unestimated(theirs))]


def show_categories(ours: CompiledProgram, theirs: CompiledProgram) -> None:
    """Prints where the cycles go."""
    counts = [cycles_by_category(plan) for plan in (ours, theirs)]
    rows = [("  Mcycles", "lazyxla", "JAX", "more")]
    for name in sorted(set().union(*counts), key=lambda name: -counts[0][name]):
        a, b = (count[name] / 1e6 for count in counts)
        rows.append((f"  {name}", f"{a:.2f}", f"{b:.2f}", f"{a - b:+.2f}"))
    print(aligned(rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=tpu_torch.MODELS, choices=tpu_torch.MODELS)
    parser.add_argument("--dtypes", nargs="+", default=tpu_torch.DTYPES, choices=tpu_torch.DTYPES)
    parser.add_argument("--layers", type=int, help="of transformers, if not their own number")
    parser.add_argument("--attention", choices=("products", "default"), default="products",
                        help="written out in PyTorch, too, or as lazyxla has it")  # fmt: skip
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="highest")
    parser.add_argument("--by-category", action="store_true")
    parser.add_argument("--hlo", type=Path, help="a directory for the optimized programs")
    args = parser.parse_args()
    torch.set_float32_matmul_precision(args.precision)

    names = [part for name in FIGURES for part in (name, "JAX", "ratio")]
    table = [("model", "dtype", *names, "unestimated", "JAX")]
    for model in args.models:
        for dtype in args.dtypes:
            ours = by_torch(model, dtype, args.layers, args.attention)
            theirs = by_jax(model, dtype, args.layers, args.precision)
            table.append(tuple(rows_of((model, dtype), ours, theirs)))
            print(aligned([table[0], table[-1]]), flush=True)
            if args.by_category:
                show_categories(ours, theirs)
            if args.hlo:
                args.hlo.mkdir(parents=True, exist_ok=True)
                for name, plan in (("lazyxla", ours), ("jax", theirs)):
                    (args.hlo / f"{model}.{dtype}.{name}.hlo").write_text(plan.optimized_hlo())
    print()
    print(aligned(table))


if __name__ == "__main__":
    main()
