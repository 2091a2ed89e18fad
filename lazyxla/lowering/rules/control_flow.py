"""Calls of PyTorch's control flow (lazyxla/control_flow.py)."""

from __future__ import annotations

from lazyxla.lowering.builder import Builder
from lazyxla.lowering.registry import rule
from lazyxla.lowering.value import Value


@rule("lazyxla::control_flow")
def control_flow(b: Builder, inputs: list[Value], name: str) -> list[Value]:
    from lazyxla.control_flow import by_name

    return by_name[name].lower(b, inputs)
