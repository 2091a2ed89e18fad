"""What rules take and return."""

from __future__ import annotations

from typing import Any

Value = Any
"""A value of the program that is built: ``jaxlib.mlir.ir.Value``, which is loaded with the first
lowering only. Its dtype and shape are ``b.dtype(x)`` and ``b.shape(x)``."""
