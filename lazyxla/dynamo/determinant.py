"""Determinants of matrices that are not contiguous.

The LU decomposition that ``det`` and ``slogdet`` keep for their gradients is, on the device, always
that of the transposed matrix if it is real. The gradients' formulas assume this where the matrix is
contiguous, and the matrix's own decomposition elsewhere: see csrc/dispatch/determinant.cpp, which
does for operators that are recorded what this does for a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)


def transpose_for_determinants(graph: fx.Graph) -> None:
    """Transposes real matrices that are not contiguous before their determinant is taken.

    That changes no determinant, and makes the LU decomposition the matrix's own.
    """
    for target in _DETERMINANTS:
        for node in graph.find_nodes(op="call_function", target=target):
            matrix = node.args[0]
            value = matrix.meta["val"]
            if value.is_complex() or value.is_contiguous():
                continue
            with graph.inserting_before(node):
                transposed = graph.call_function(aten.transpose.int, (matrix, -2, -1))
                # Contiguous also where the recorder gets it, which transposes any other.
                kept: dict[str, Any] = {"memory_format": torch.contiguous_format}
                contiguous = graph.call_function(aten.clone.default, (transposed,), kept)
            transposed.meta["val"] = value.mT
            contiguous.meta["val"] = value.mT.contiguous()
            node.args = (contiguous,)
