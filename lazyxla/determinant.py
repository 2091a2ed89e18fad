"""Determinants, and the LU decomposition that they keep for their gradients.

It is that of the transposed matrix if the matrix is real and contiguous: PyTorch's kernels save a
copy so, and the gradients' formulas ask for the strides again. A recorded operator has no strides.
Its LU is that of the transposed matrix for all real ones; one that is not contiguous is transposed
before, which changes no determinant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_library = torch.library.Library("aten", "IMPL")
_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)


def _is_recorded_as_is(matrix: Tensor) -> bool:
    return matrix.is_complex() or matrix.is_contiguous()


def _recorded(matrix: Tensor) -> Tensor:
    return matrix if _is_recorded_as_is(matrix) else matrix.mT


# The out= forms are recorded; the functional ones call them.
def _det(matrix: Tensor) -> tuple[Tensor, ...]:
    determinant, lu = matrix.new_empty(0), matrix.new_empty(0)
    pivots = matrix.new_empty(0, dtype=torch.int32)
    return aten._linalg_det.result(_recorded(matrix), result=determinant, LU=lu, pivots=pivots)


def _slogdet(matrix: Tensor) -> tuple[Tensor, ...]:
    sign, lu = matrix.new_empty(0), matrix.new_empty(0)
    logarithm = matrix.new_empty(0, dtype=matrix.dtype.to_real())
    pivots = matrix.new_empty(0, dtype=torch.int32)
    return aten._linalg_slogdet.sign(
        _recorded(matrix), sign=sign, logabsdet=logarithm, LU=lu, pivots=pivots
    )


def transpose_for_determinants(graph: fx.Graph) -> None:
    """Does for a traced graph what the kernels above do for operators that are recorded."""
    for target in _DETERMINANTS:
        for node in graph.find_nodes(op="call_function", target=target):
            matrix = node.args[0]
            value = matrix.meta["val"]
            if _is_recorded_as_is(value):
                continue
            with graph.inserting_before(node):
                transposed = graph.call_function(aten.transpose.int, (matrix, -2, -1))
                # Contiguous also where the recorder gets it, which transposes any other.
                kept: dict[str, Any] = {"memory_format": torch.contiguous_format}
                contiguous = graph.call_function(aten.clone.default, (transposed,), kept)
            transposed.meta["val"] = value.mT
            contiguous.meta["val"] = value.mT.contiguous()
            node.args = (contiguous,)


def install() -> None:
    """Registers the operators for the device. Once per process."""
    _library.impl("_linalg_det", _det, "PrivateUse1")
    _library.impl("_linalg_slogdet", _slogdet, "PrivateUse1")
