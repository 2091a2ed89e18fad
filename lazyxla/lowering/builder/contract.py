"""Operations that multiply two values and sum: matmul, convolution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lazyxla.lowering.builder.reductions import Reductions
from lazyxla.lowering.value import Value


class DotOperand(NamedTuple):
    """One side of a dot: a value, which of its dimensions are contracted, which of the batch."""

    value: Value
    contract: Sequence[int]
    batch: Sequence[int]

    @property
    def free(self) -> list[int]:
        """The other dimensions."""
        dims = range(self.value.rank)
        return [d for d in dims if d not in self.contract and d not in self.batch]

    @property
    def free_sizes(self) -> list[int]:
        return [self.value.shape[d] for d in self.free]


class Contractions(Reductions):
    """The multiplying part of the Builder."""

    def precision(self, dtype: torch.dtype) -> Any:
        """XLA's precision for a dot of `dtype`, by the node's torch.float32_matmul_precision."""
        if dtype not in (torch.float32, torch.complex64):
            return None
        wanted = {"highest": "HIGHEST", "high": "HIGH", "medium": "DEFAULT"}
        name = wanted[self.settings.matmul_precision]
        key = ("precision", name)
        found = self.mlir.attributes.get(key)
        if found is None:
            item = self.hlo.PrecisionAttr.get(name)
            found = self.mlir.attributes[key] = self.mlir.ir.ArrayAttr.get([item, item])
        return found

    def dot(
        self,
        lhs: Value,
        rhs: Value,
        lhs_contract: Sequence[int],
        rhs_contract: Sequence[int],
        lhs_batch: Sequence[int] = (),
        rhs_batch: Sequence[int] = (),
        dtype: torch.dtype | None = None,
    ) -> Value:
        """General dot product in `dtype` (lhs's, if None).

        The result's dimensions are the batch ones, the free ones of lhs, the free ones of rhs.

        A transpose that defines an operand is folded into the dimension numbers: XLA's CPU backend
        multiplies by a weight in either layout far faster than it transposes one.
        """
        left = self.folded(DotOperand(lhs, lhs_contract, lhs_batch))
        right = self.folded(DotOperand(rhs, rhs_contract, rhs_batch))
        return self.platform_dot(left, right, dtype)

    def platform_dot(self, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value:
        """`dot`, in the form in which the platform's compiler is best at it."""
        return self.plain_dot(left, right, dtype)

    def plain_dot(self, left: DotOperand, right: DotOperand, dtype: torch.dtype | None) -> Value:
        """`dot` as it is written."""
        numbers = self.hlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=left.batch,
            rhs_batching_dimensions=right.batch,
            lhs_contracting_dimensions=left.contract,
            rhs_contracting_dimensions=right.contract,
        )
        shape = [left.value.shape[i] for i in left.batch] + left.free_sizes + right.free_sizes
        return self.hlo.dot_general(
            self.type(dtype or left.value.dtype, shape),
            left.value,
            right.value,
            numbers,
            precision_config=self.precision(left.value.dtype),
        )

    def matmul(self, lhs: Value, rhs: Value, dtype: torch.dtype | None = None) -> Value:
        """torch.matmul of values of equal rank >= 2 with equal batch dimensions."""
        batch = list(range(lhs.rank - 2))
        return self.dot(lhs, rhs, [-1], [-2], batch, batch, dtype)

    def apply_maps(self, x: Value, maps: Sequence[Value], adjoint: bool = False) -> Value:
        """`x` with one matrix (out, in), or its transpose, applied to each of its last dimensions,
        in order.
        """
        for weights in maps:
            # The contracted dimension is removed, and its result is last: all maps together restore
            # the order.
            x = self.dot(x, weights, [x.rank - len(maps)], [0 if adjoint else 1])
        return x

    def folded(self, x: DotOperand) -> DotOperand:
        """The same without a transpose that defines the value."""
        rank = x.value.rank
        contract, batch = [d % rank for d in x.contract], [d % rank for d in x.batch]
        found = self.untransposed(x.value)
        if found is None:
            return DotOperand(x.value, contract, batch)
        source, order = found
        free = [order[i] for i in range(rank) if i not in contract and i not in batch]
        longer = [i for i in free if source.shape[i] != 1]
        if longer != sorted(longer) or (len(longer) < len(free) and free != sorted(free)):
            # Without the transpose the result would be in another order.
            return DotOperand(x.value, contract, batch)
        return self.folded(
            DotOperand(source, [order[i] for i in contract], [order[i] for i in batch])
        )

    def untransposed(self, x: Value) -> tuple[Value, list[int]] | None:
        """(y, order) such that x = transpose(y, order), if a transpose defines x."""
        owner = x.owner
        name = getattr(owner, "name", None)
        if name == "stablehlo.transpose":
            return self.operand(owner), list(owner.attributes["permutation"])
        if name != "stablehlo.reshape":
            return None
        # A reshape that drops all dimensions of size 1 commutes with a transpose.
        found = self.untransposed(self.operand(owner))
        if found is None:
            return None
        source, order = found
        sizes = source.shape
        longer = [i for i, n in enumerate(sizes) if n != 1]
        moved = [i for i in order if sizes[i] != 1]
        if tuple(sizes[i] for i in moved) != x.shape:
            return None
        squeezed = source.reshape([sizes[i] for i in longer])
        return squeezed, [longer.index(i) for i in moved]

    def operand(self, operation: Any) -> Value:
        """The first operand of an operation of this module."""
        return self.wrap([operation.operands[0]])[0]

    def conv(
        self,
        lhs: Value,
        rhs: Value,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        groups: int = 1,
        batch_groups: int = 1,
        layout: str = "NC_OI_NC",
        reverse: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """Convolution (cross-correlation, as in PyTorch) over the trailing spatial dimensions.

        `layout` names the first two dimensions of lhs, rhs and result, for example NC_OI_NC or, for
        a gradient with respect to the weight, CN_IO_CN. `reverse` flips the window. The result's
        dtype is `dtype`; if None, the one that the platform's compiler is best at.
        """
        spatial = list(range(2, lhs.rank))
        ones = [1] * len(spatial)
        lhs_dilation, rhs_dilation = list(lhs_dilation or ones), list(rhs_dilation or ones)
        a, b, c = layout.split("_")
        left, right = lhs.shape, rhs.shape
        sizes = [0, 0]
        sizes[c.index("N")] = left[a.index("N")] // batch_groups
        sizes[c.index("C")] = right[b.index("O")]
        for i, pad in enumerate(padding):
            base = (left[i + 2] - 1) * lhs_dilation[i] + 1 + sum(pad) if left[i + 2] else sum(pad)
            reach = (right[i + 2] - 1) * rhs_dilation[i] + 1
            sizes.append(0 if base < reach else (base - reach) // strides[i] + 1)
        numbers = self.hlo.ConvDimensionNumbers.get(
            input_batch_dimension=a.index("N"),
            input_feature_dimension=a.index("C"),
            input_spatial_dimensions=spatial,
            kernel_input_feature_dimension=b.index("I"),
            kernel_output_feature_dimension=b.index("O"),
            kernel_spatial_dimensions=spatial,
            output_batch_dimension=c.index("N"),
            output_feature_dimension=c.index("C"),
            output_spatial_dimensions=spatial,
        )
        i64 = self.mlir.element(torch.int64)
        ir = self.mlir.ir
        return self.hlo.convolution(
            self.type(dtype or lhs.dtype, sizes),
            lhs,
            rhs,
            numbers,
            ir.IntegerAttr.get(i64, groups),
            ir.IntegerAttr.get(i64, batch_groups),
            window_strides=list(strides),
            padding=self.pairs(padding),
            lhs_dilation=lhs_dilation,
            rhs_dilation=rhs_dilation,
            window_reversal=ir.DenseBoolArrayAttr.get([True] * len(spatial)) if reverse else None,
            precision_config=self.precision(lhs.dtype),
        )
