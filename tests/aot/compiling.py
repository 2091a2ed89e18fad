"""Compiling the program of one operator for a topology, and what came of it."""

from __future__ import annotations

import torch

from lazyxla.aot import Topology
from lazyxla.lowering import Program, SlotSpec


def refusal(topology: Topology, program: Program) -> str | None:
    """Why the operator's program is not compiled for the topology, or None if it is.

    It is compiled as it runs first, with its numbers as constants, and as it runs when they have
    changed, with numbers as float64 and int64 inputs.
    """
    variable = program._replace(slots=[_changed(slot) for slot in program.slots])
    for each in [program] if variable == program else [program, variable]:
        try:
            topology.compile(each)
        except Exception as error:  # of the lowering or of the compiler
            return f"{type(error).__name__}: {error}"
    return None


def _changed(slot: SlotSpec) -> SlotSpec:
    can_vary = slot.dtype != torch.bool and not slot.dtype.is_complex
    return slot._replace(variable=can_vary)
