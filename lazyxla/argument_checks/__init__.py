"""Checks of arguments that PyTorch's meta functions leave to kernels, which no call here reaches.

Most are made by calling the CPU's kernel with as little data as suffices (csrc/dispatch/checks.h):
the tables list the operators, and the element to call with. What needs all of the sizes, more than
sizes, or would take the kernel's time, is checked here: a lowering rule would broadcast or cut such
tensors, so that a mistake gave wrong numbers, or would fail far from the call.

A check is called with the arguments by their names in the operator's schema. That of an in-place or
out= form may lack some. It raises what PyTorch's CPU raises.
"""

from __future__ import annotations

from lazyxla import _C
from lazyxla.argument_checks import (
    indices,
    kernel_warnings,
    numbers,
    operand_shapes,
    quantization,
    values,
    windows,
)
from lazyxla.argument_checks.cpu import NOT_ON_CPU, NUMBERS, ON_CPU
from lazyxla.argument_checks.tables import AFTER, BEFORE, OF_NUMBERS, VALUES, WARNINGS

__all__ = [
    "indices",
    "install",
    "kernel_warnings",
    "numbers",
    "operand_shapes",
    "quantization",
    "values",
    "windows",
]


def install() -> None:
    """Hands the tables to C++. Once per process, before operators are registered."""
    of_element = {name: element for element, names in ON_CPU.items() for name in names}
    _C.install_argument_checks(
        of_element, NOT_ON_CPU, NUMBERS, BEFORE, AFTER, OF_NUMBERS, VALUES, WARNINGS
    )
