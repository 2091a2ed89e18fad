"""Lowering: from a recorded program to StableHLO.

`lower` turns a `Program` (what the C++ recorder hands over on a cache miss) into a StableHLO
portable artifact. Each operator is lowered by the first of these that exists: its own rule
(`rule`), its JAX rule (`jax_rule`), PyTorch's decomposition of it, a host call. All other operators
run on the host, between two programs. Importing this package loads neither jaxlib nor JAX; the
first lowering loads jaxlib, the first JAX rule that runs loads JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lazyxla.lowering.errors import DifferentProgramsError, LoweringError
from lazyxla.lowering.explanation import Explanation, explain
from lazyxla.lowering.host_call import allow_host_calls
from lazyxla.lowering.lookup import how
from lazyxla.lowering.optimized import result_tiles
from lazyxla.lowering.program import (
    Geometry,
    Lowered,
    Node,
    Program,
    Ref,
    Slot,
    SlotSpec,
    Target,
    TensorSpec,
)
from lazyxla.lowering.registry import has_user_rules, names, on_change
from lazyxla.lowering.user_rules import jax_rule, rule

if TYPE_CHECKING:
    from lazyxla.lowering.fx_graph import FxGraph

__all__ = [
    "DifferentProgramsError",
    "Explanation",
    "Geometry",
    "Lowered",
    "LoweringError",
    "Node",
    "Program",
    "Ref",
    "Slot",
    "SlotSpec",
    "Target",
    "TensorSpec",
    "allow_host_calls",
    "check_lowering",
    "explain",
    "has_user_rules",
    "how",
    "jax_rule",
    "lower",
    "lower_graph",
    "lower_to_text",
    "names",
    "on_change",
    "result_tiles",
    "rule",
]


def lower(program: Program, target: Target | str, *, verify: bool = False) -> Lowered:
    """Lowers `program` for `target`, of which the platform's name is enough.

    `verify` runs MLIR's verifier over the module. Raises LoweringError, naming the operator, when a
    node cannot be lowered.
    """
    from lazyxla.lowering.module import lower as run

    return run(program, _target(target), verify=verify)


def check_lowering(program: Program, platform: str) -> str:
    """Where `program` would run: "device", "call" if it calls the host, "host" if not at all."""
    from lazyxla.lowering.module import check_lowering as run

    return run(program, Target(platform))


def lower_to_text(program: Program, target: Target | str) -> str:
    """The module that `lower` makes of `program`, as StableHLO text, for people."""
    from lazyxla.lowering.module import lower_to_text as run

    return run(program, _target(target))


def lower_graph(graph: FxGraph, target: Target | str, random: bool) -> bytes:
    """The module that a graph of ATen's operators becomes, in bytecode, with its function `main`.

    `random`: the operators that draw random numbers do so from a key, uint32[2], which is the
    first argument. Raises LoweringError when something can only run on the host.
    """
    from lazyxla.lowering.module import lower_graph as run

    return run(graph, _target(target), random)


def _target(target: Target | str) -> Target:
    return Target(target) if isinstance(target, str) else target
