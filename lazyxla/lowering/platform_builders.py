"""Which builder writes programs for which platform."""

from __future__ import annotations

from typing import Any

from lazyxla.lowering.builder import Apply, Builder
from lazyxla.lowering.cpu.builder import CpuBuilder
from lazyxla.lowering.cuda.builder import CudaBuilder
from lazyxla.lowering.mlir import Mlir
from lazyxla.lowering.program import Target
from lazyxla.lowering.scalar import SlotTable
from lazyxla.lowering.tpu.builder import TpuBuilder

_BUILDERS: dict[str, type[Builder]] = {
    "cpu": CpuBuilder,
    "cuda": CudaBuilder,
    "tpu": TpuBuilder,
}


def make_builder(
    world: Mlir, target: Target, slots: SlotTable, apply: Apply, **options: Any
) -> Builder:
    """The builder of a new module; `apply` lowers an operator."""
    builder = _BUILDERS.get(target.platform, Builder)
    return builder(world, target, slots, apply, world.ir.Module.create(), **options)
