"""Operations that multiply two values and sum: matrix products, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazyxla.lowering.builder import contract_cpu, contract_tpu
from lazyxla.lowering.builder.elements import Value
from lazyxla.lowering.builder.reductions import Reductions
from lazyxla.lowering.errors import LoweringError


class Contractions(Reductions):
    """The multiplying part of the Builder."""

    def precision(self, dtype: torch.dtype) -> Any:
        """XLA's precision for products of `dtype`, by the node's torch.float32_matmul_precision."""
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
        """General product in `dtype` (lhs's, if None).

        The result's dimensions are the batch ones, the free ones of lhs, the free ones of rhs.

        A transpose that defines an operand is folded into the dimension numbers: XLA's CPU backend
        multiplies by a weight in either layout far faster than it transposes one.
        """
        lhs, lhs_contract, lhs_batch = self.fold(lhs, lhs_contract, lhs_batch)
        rhs, rhs_contract, rhs_batch = self.fold(rhs, rhs_contract, rhs_batch)
        if self.platform == "cpu" and not lhs_batch and not self.target.any_sizes:
            return contract_cpu.product(self, lhs, rhs, lhs_contract, rhs_contract, dtype)
        if self.platform == "tpu":
            left = contract_tpu.Operand(lhs, lhs_contract, lhs_batch)
            right = contract_tpu.Operand(rhs, rhs_contract, rhs_batch)
            return contract_tpu.product(self, left, right, dtype)
        return self.plain_dot(lhs, rhs, lhs_contract, rhs_contract, lhs_batch, rhs_batch, dtype)

    def plain_dot(
        self,
        lhs: Value,
        rhs: Value,
        lhs_contract: Sequence[int],
        rhs_contract: Sequence[int],
        lhs_batch: Sequence[int],
        rhs_batch: Sequence[int],
        dtype: torch.dtype | None,
    ) -> Value:
        """The product as it is written."""
        a, b = self.spec(lhs), self.spec(rhs)
        free = [n for i, n in enumerate(a.shape) if i not in lhs_batch and i not in lhs_contract]
        free += [n for i, n in enumerate(b.shape) if i not in rhs_batch and i not in rhs_contract]
        shape = [a.shape[i] for i in lhs_batch] + free
        if self.platform == "tpu" and torch.int64 in (a.dtype, dtype):
            left = self._lined_up(lhs, lhs_batch, lhs_contract, 0, len(b.shape))
            right = self._lined_up(rhs, rhs_batch, rhs_contract, len(a.shape), 0)
            return self._sum_of_products(left, right, len(lhs_contract), shape)
        numbers = self.hlo.DotDimensionNumbers.get(
            lhs_batching_dimensions=lhs_batch,
            rhs_batching_dimensions=rhs_batch,
            lhs_contracting_dimensions=lhs_contract,
            rhs_contracting_dimensions=rhs_contract,
        )
        return self.hlo.dot_general(
            self.type(dtype or a.dtype, shape),
            lhs,
            rhs,
            numbers,
            precision_config=self.precision(a.dtype),
        )

    def _lined_up(
        self, x: Value, batch: Sequence[int], contract: Sequence[int], before: int, after: int
    ) -> Value:
        """An operand of a product with dimensions: batch, free ones of both sides, contracted.

        `before` or `after` is the other side's rank; its free dimensions are of size 1 here.
        """
        sizes, taken = self.shape(x), len(batch) + len(contract)
        free = [i for i in range(len(sizes)) if i not in batch and i not in contract]
        other = [1] * max(before + after - taken, 0)
        own = [sizes[i] for i in free]
        middle = other + own if before else own + other
        moved = self.transpose(x, [*batch, *free, *contract])
        lead, last = [sizes[i] for i in batch], [sizes[i] for i in contract]
        return self.reshape(moved, [*lead, *middle, *last])

    def _sum_of_products(self, left: Value, right: Value, count: int, shape: list[int]) -> Value:
        """The product of int64 operands, elementwise and summed over the last `count` dimensions.

        XLA's TPU compiler makes pairs of 32-bit numbers of 64-bit ones, but not in a product ("HLO
        for which this rewriting is not implemented"). It fuses the two steps taken here.
        """
        sizes = [max(n, m) if n and m else 0 for n, m in zip(self.shape(left), self.shape(right))]
        x, y = (self.broadcast_to(self.convert(v, torch.int64), sizes) for v in (left, right))
        dims = range(len(sizes) - count, len(sizes))
        return self.reshape(self.reduce(self.hlo.multiply(x, y), list(dims), "sum"), shape)

    def matmul(self, lhs: Value, rhs: Value, dtype: torch.dtype | None = None) -> Value:
        """torch.matmul of values of equal rank >= 2 with equal batch dimensions."""
        rank = self.rank(lhs)
        batch = list(range(rank - 2))
        return self.dot(lhs, rhs, [rank - 1], [rank - 2], batch, batch, dtype)

    def fold(
        self, x: Value, contract: Sequence[int], batch: Sequence[int]
    ) -> tuple[Value, list[int], list[int]]:
        """An operand of `dot` and its dimensions, with a transpose that defines it taken away."""
        rank = self.rank(x)
        contract, batch = [d % rank for d in contract], [d % rank for d in batch]
        found = self.untransposed(x)
        if found is None:
            return x, contract, batch
        source, order = found
        free = [order[i] for i in range(rank) if i not in contract and i not in batch]
        sizes = self.shape(source)
        wide = [i for i in free if sizes[i] != 1]
        if wide != sorted(wide) or (len(wide) < len(free) and free != sorted(free)):
            return x, contract, batch  # without the transpose the product would be in another order
        return self.fold(source, [order[i] for i in contract], [order[i] for i in batch])

    def untransposed(self, x: Value) -> tuple[Value, list[int]] | None:
        """(y, order) such that x = transpose(y, order), if a transpose defines x."""
        owner = x.owner
        name = getattr(owner, "name", None)
        if name == "stablehlo.transpose":
            return owner.operands[0], list(owner.attributes["permutation"])
        if name != "stablehlo.reshape":
            return None
        # A reshape that drops all dimensions of size 1 can change places with a transpose.
        found = self.untransposed(owner.operands[0])
        if found is None:
            return None
        source, order = found
        sizes = self.shape(source)
        wide = [i for i, n in enumerate(sizes) if n != 1]
        moved = [i for i in order if sizes[i] != 1]
        if tuple(sizes[i] for i in moved) != self.shape(x):
            return None
        return self.reshape(source, [sizes[i] for i in wide]), [wide.index(i) for i in moved]

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
        a gradient with respect to the weight, CN_IO_CN. `reverse` flips the window.
        """
        if self.platform == "tpu" and self.dtype(lhs) == torch.int64:
            raise LoweringError("XLA's TPU compiler has no convolution of int64")
        rank = self.rank(lhs)
        spatial = list(range(2, rank))
        ones = [1] * len(spatial)
        lhs_dilation, rhs_dilation = list(lhs_dilation or ones), list(rhs_dilation or ones)
        a, b, c = layout.split("_")
        left, right = self.shape(lhs), self.shape(rhs)
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
            self.type(dtype or self.dtype(lhs), sizes),
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
            precision_config=self.precision(self.dtype(lhs)),
        )
