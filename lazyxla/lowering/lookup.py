"""Which lowering an operator has."""

from __future__ import annotations

from lazyxla.lowering import host_call, registry
from lazyxla.lowering.operators import find_decomposition


def how(name: str) -> str:
    """How `name` is lowered: "rule", "jax", "decomposition", "call" or "host".

    "graph" stands for an operator that is lowered in traced graphs only and is otherwise handled by
    the recorder, "call" for one that a program on the CPU calls on the host, "host" for one that is
    not lowered at all. To distinguish these two, and for rules of some platforms only, the plugin
    is started.
    """
    if registry.has_rule(name):
        return "rule"
    if (platforms := registry.platforms_of(name)) and recorded_platform() in platforms:
        return "rule"
    jax_rule = registry.find_jax_rule(name)
    if jax_rule and (not jax_rule.platforms or recorded_platform() in jax_rule.platforms):
        return "jax"
    if registry.find_rule(name):
        return "graph"
    if find_decomposition(name) is not None:
        return "decomposition"
    return "call" if host_call.possible(name) else "host"


def recorded_platform() -> str:
    """The platform that programs are recorded for: a capture's, or the process's."""
    from lazyxla import _C
    from lazyxla.runtime import platform

    return _C.captured_platform() or platform()
