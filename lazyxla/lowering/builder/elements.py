"""Element-wise matters: constants, dtypes, conversion, promotion, comparison."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lazyxla.lowering.mlir import Mlir
from lazyxla.lowering.partition import Annotations
from lazyxla.lowering.program import Settings, Target, TensorSpec
from lazyxla.lowering.scalar import Scalar, SlotTable, wrap_number
from lazyxla.lowering.value import Number, Operand, Value

_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_NARROW_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16)


class Elements:
    """The element-wise part of the Builder."""

    mlir: Mlir
    hlo: Any
    platform: str
    target: Target
    slots: SlotTable
    settings: Settings
    buffers: dict[torch.dtype, Value]
    annotations: Annotations | None  # of a program for many devices
    range_dtype = torch.float64
    """The dtype that ranges of narrower floats are computed in, as PyTorch does."""

    # ---- types ----

    def spec(self, x: Value) -> TensorSpec:
        """dtype and shape of a value."""
        return TensorSpec(x.dtype, x.shape)

    def dtype(self, x: Operand) -> torch.dtype:
        """The torch dtype of a value, Scalar or Python number."""
        if isinstance(x, Scalar):
            return x.dtype
        if isinstance(x, (bool, int, float, complex)):
            return wrap_number(x).dtype
        return x.dtype

    def shape(self, x: Operand) -> tuple[int, ...]:
        """The shape of a value; () for a Scalar or Python number."""
        if isinstance(x, (Scalar, bool, int, float, complex)):
            return ()
        return x.shape

    def type(self, dtype: torch.dtype, shape: Sequence[int] = ()) -> Any:
        """The MLIR type tensor<shape x dtype>."""
        return self.mlir.type(dtype, tuple(shape))

    @staticmethod
    def compute_dtype(dtype: torch.dtype) -> torch.dtype:
        """The dtype that PyTorch accumulates in: float32 for narrower floats, else `dtype`."""
        return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype

    @staticmethod
    def real_dtype(dtype: torch.dtype) -> torch.dtype:
        """float32 for complex64, float64 for complex128, else `dtype`."""
        return _REAL.get(dtype, dtype)

    def wrap(self, values: Iterable[Any]) -> list[Value]:
        """Values of the program, from MLIR's."""
        return [Value(self, value) for value in values]  # type: ignore[arg-type]

    # ---- constants and scalars ----

    def constant(self, value: Number, dtype: torch.dtype, shape: Sequence[int] = ()) -> Value:
        """A constant of `shape` with every element `value` (converted like torch.full does)."""
        shape = tuple(shape)
        if dtype.is_complex and shape:  # MLIR's bindings make no complex splats
            return self.hlo.broadcast_in_dim(
                self.type(dtype, shape), self.constant(value, dtype), []
            )
        return self.hlo.constant(self._splat(value, dtype, shape))

    def full(self, shape: Sequence[int], value: Operand, dtype: torch.dtype) -> Value:
        """A value of `shape` filled with a number, a Scalar or a 0-dim value."""
        if (number := self.known(value)) is not None:
            return self.constant(number, dtype, shape)
        return self.broadcast_to(self.value(value, dtype), shape)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Value:
        return self.constant(0, dtype, shape)

    def full_like(self, x: Value, value: Number) -> Value:
        """A constant with the dtype and shape of `x`."""
        dtype, shape = self.spec(x)
        return self.constant(value, dtype, shape)

    def array(self, values: Sequence[Any], dtype: torch.dtype) -> Value:
        """A small dense constant from (nested) numbers; anything long is better built by `iota`."""
        data = torch.tensor(values, dtype=dtype)
        if dtype == torch.bfloat16:
            return self.convert(self.array(values, torch.float32), dtype)
        flat = data.reshape(-1)
        if flat.numel() and bool((flat == flat[0]).all()):
            return self.constant(flat[0].item(), dtype, data.shape)
        ir, type_ = self.mlir.ir, self.type(dtype, data.shape)
        if dtype == torch.bool:
            items = [ir.BoolAttr.get(v) for v in flat.tolist()]
            return self.hlo.constant(ir.DenseElementsAttr.get(items, type_))
        return self.hlo.constant(ir.DenseElementsAttr.get(data.numpy(), type=type_))

    def iota(self, shape: Sequence[int], dim: int, dtype: torch.dtype) -> Value:
        """0, 1, 2, ... along `dim`."""
        if dtype == torch.bool:
            return self.convert(self.iota(shape, dim, torch.int32), dtype)
        return self.hlo.iota(self.type(dtype, shape), dim % len(shape))

    def lowest(self, dtype: torch.dtype) -> Number:
        """The neutral element of max: -inf, False or the smallest integer."""
        if dtype.is_floating_point:
            return -float("inf")
        return False if dtype == torch.bool else torch.iinfo(dtype).min

    def highest(self, dtype: torch.dtype) -> Number:
        """The neutral element of min: inf, True or the largest integer."""
        if dtype.is_floating_point:
            return float("inf")
        return True if dtype == torch.bool else torch.iinfo(dtype).max

    def value(self, x: Operand, dtype: torch.dtype | None = None) -> Value:
        """A Scalar or number as a 0-dim value of `dtype` (its own dtype if None), dynamic if its
        slot varies. A value is returned as it is, converted to `dtype` if given.
        """
        if isinstance(x, (bool, int, float, complex)):
            x = wrap_number(x)
        if not isinstance(x, Scalar):
            return x if dtype is None else self.convert(x, dtype)
        dtype = dtype or x.dtype
        if not x.variable:
            return self.constant(x.number, dtype)
        if x.parts is not None:
            real, imaginary = (self.value(p, _REAL.get(dtype, torch.float64)) for p in x.parts)
            return self.convert(self.complex(real, imaginary), dtype)
        buffer, index = self.slots.place(x.slot)
        part = self.hlo.slice(self.buffers[buffer], [index], [index + 1], [1])
        return self.convert(self.hlo.reshape(self.type(buffer, ()), part), dtype)

    def is_const(self, x: Operand, number: Number | None = None) -> bool:
        """Whether `x` is known now (and equal to `number`); this does not make its slot static."""
        if isinstance(x, Scalar):
            return not x.variable and (number is None or x.number == number)
        if isinstance(x, (bool, int, float, complex)):
            return number is None or x == number
        return False

    def known(self, x: Operand) -> Number | None:
        """The number if it is known now, else None; this does not make its slot static."""
        if isinstance(x, Scalar):
            return None if x.variable else x.number
        return x if isinstance(x, (bool, int, float, complex)) else None

    # ---- conversion ----

    def convert(self, x: Value, dtype: torch.dtype) -> Value:
        """torch's `.to(dtype)`: truncation, `!= 0` for bool, the real part of complex."""
        source, shape = x.dtype, x.shape
        if source == dtype:
            return x
        hlo = self.hlo
        if dtype == torch.bool:
            return self.compare(x, self.constant(0, source, shape), "NE")
        if source.is_complex and not dtype.is_complex:
            return self.convert(hlo.real(x), dtype)
        if dtype.is_complex and not source.is_complex:
            part = self.convert(x, _REAL[dtype])
            return hlo.complex(part, self.constant(0, _REAL[dtype], shape))
        if dtype in _NARROW_INTEGERS and source.is_floating_point:
            # XLA saturates where PyTorch's CPU kernels wrap around.
            x = hlo.convert(self.type(torch.int32, shape), x)
        if dtype == torch.uint32 and source.is_floating_point:
            # So that negative numbers wrap around.
            x = hlo.convert(self.type(torch.int64, shape), x)
        if dtype == torch.uint64 and source.is_floating_point:
            signed = hlo.convert(self.type(torch.int64, shape), x)
            negative = self.bitcast(signed, dtype)
            return self.select(x < 0, negative, hlo.convert(self.type(dtype, shape), x))
        if dtype == torch.float8_e4m3fn and not source.is_complex:
            # PyTorch saturates, at infinity too, where XLA makes nan: there is no infinity.
            wide = source if source.is_floating_point and source.itemsize > 1 else torch.float32
            bound = torch.finfo(dtype).max
            low, high = (self.constant(v, wide, shape) for v in (-bound, bound))
            x = hlo.clamp(low, self.convert(x, wide), high)
        return hlo.convert(self.type(dtype, shape), x)

    def bitcast(self, x: Value, dtype: torch.dtype) -> Value:
        """The same bits as another dtype of equal width (bool counts as uint8 0/1)."""
        source, shape = x.dtype, x.shape
        if source == dtype:
            return x
        if source == torch.bool or dtype == torch.bool:
            middle = torch.uint8
            as_bytes = self.convert(x, middle) if source == torch.bool else self.bitcast(x, middle)
            return (
                self.convert(as_bytes, dtype)
                if dtype == torch.bool
                else self.bitcast(as_bytes, dtype)
            )
        return self.hlo.bitcast_convert(self.type(dtype, shape), x)

    def complex(self, real: Value, imag: Value) -> Value:
        return self.hlo.complex(real, imag)

    # ---- promotion and broadcasting ----

    def result_type(self, *xs: Operand) -> torch.dtype:
        """torch.result_type over values, Scalars and Python numbers."""
        # A lower class (0-dim tensors, then Python numbers) counts only if its category is higher.
        classes: list[torch.dtype | None] = [None, None, None]
        for x in xs:
            dtype = self.dtype(x)
            if not isinstance(x, Value):
                wrapped = x.wrapped if isinstance(x, Scalar) else True
                level = 2 if wrapped else 1
                if wrapped and dtype.is_floating_point:
                    dtype = self.settings.default_dtype
                elif wrapped and dtype.is_complex:
                    dtype = self.settings.default_dtype.to_complex()
            else:
                level = 0 if self.shape(x) else 1
            known = classes[level]
            classes[level] = dtype if known is None else torch.promote_types(known, dtype)
        result = _combine(classes[0], _combine(classes[1], classes[2]))
        assert result is not None
        return result

    def promote(self, *xs: Operand, dtype: torch.dtype | None = None) -> list[Value]:
        """The operands as values of one dtype: `dtype`, or torch.result_type of all."""
        dtype = dtype or self.result_type(*xs)
        return [self.value(x, dtype) for x in xs]

    def align(self, *xs: Operand, dtype: torch.dtype | None = None) -> list[Value]:
        """`promote`, then `broadcast`: operands ready for an element-wise operation."""
        return self.broadcast(*self.promote(*xs, dtype=dtype))

    def broadcast(self, *xs: Value) -> list[Value]:
        """The values broadcast to their common shape."""
        shapes = {self.shape(x) for x in xs}
        if len(shapes) == 1:
            return list(xs)
        common = _common_shape(shapes)
        return [self.broadcast_to(x, common) for x in xs]

    def broadcast_to(self, x: Value, shape: Sequence[int]) -> Value:
        """PyTorch's expand: dimensions are aligned at the end, sizes of 1 are repeated."""
        dtype, old = x.dtype, x.shape
        shape = tuple(shape)
        if old == shape:
            return x
        splat = self._splat_of(x)
        if splat is not None:
            return self.hlo.constant(
                self.mlir.ir.DenseElementsAttr.get_splat(self.type(dtype, shape), splat)
            )
        shift = len(shape) - len(old)
        kept = [i for i, n in enumerate(old) if n == shape[i + shift]]
        if len(kept) != len(old):
            x = self.hlo.reshape(self.type(dtype, [old[i] for i in kept]), x)
        return self.hlo.broadcast_in_dim(self.type(dtype, shape), x, [i + shift for i in kept])

    # ---- selection ----

    def compare(self, x: Value, y: Value, direction: str) -> Value:
        """`direction`: EQ, NE, LT, LE, GT or GE; both values have one dtype and shape."""
        how, kind = self._comparison(direction, self.dtype(x))
        return self.hlo.compare(x, y, how, compare_type=kind)

    def select(self, predicate: Value, x: Operand, y: Operand) -> Value:
        """Element-wise `predicate ? x : y`; a number takes the other's dtype; all broadcast."""
        if not isinstance(x, Value):
            x = self.value(x, self.dtype(y))
        if not isinstance(y, Value):
            y = self.value(y, self.dtype(x))
        predicate, x, y = self.broadcast(predicate, x, y)
        return self.hlo.select(predicate, x, y)

    def absolute(self, x: Value) -> Value:
        """|x|; of a complex value infinity if a part is infinite, else nan if one is nan."""
        return self.hlo.abs(x)

    def maximum(self, x: Value, y: Value) -> Value:
        """The greater one of each two elements; nan if one of both is nan."""
        return x.call("maximum", y)

    def minimum(self, x: Value, y: Value) -> Value:
        """The smaller one of each two elements; nan if one of both is nan."""
        return x.call("minimum", y)

    def log1p(self, x: Value) -> Value:
        """log(1 + x), exact for small x."""
        return self.hlo.log_plus_one(x)

    def has_bits(self, dtype: torch.dtype) -> bool:
        """Whether values of a float dtype can be read as integers (`bitcast`)."""
        return True

    def sign_bit(self, x: Value) -> Value:
        """Whether the sign bit of a float is set, for a zero and a nan as well."""
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
        return self.bitcast(x, whole) < 0

    def wrap_index(self, index: Value, size: int) -> Value:
        """Negative indices counted from the end: `index < 0 ? index + size : index`."""
        return self.select(index < 0, index + size, index)

    # ---- attributes ----

    def _comparison(self, direction: str, dtype: torch.dtype) -> tuple[Any, Any]:
        """The attributes of a comparison: its direction, and how elements are understood.

        Without the latter XLA compares constants as if they were unsigned.
        """
        if dtype.is_floating_point or dtype.is_complex:
            kind = "FLOAT"
        else:
            kind = "SIGNED" if dtype != torch.bool and torch.iinfo(dtype).min < 0 else "UNSIGNED"
        found = self.mlir.attributes.get((direction, kind))
        if found is None:
            hlo = self.hlo
            found = hlo.ComparisonDirectionAttr.get(direction), hlo.ComparisonTypeAttr.get(kind)
            self.mlir.attributes[direction, kind] = found
        return found

    def _splat(self, value: Number, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        key = (value, type(value), str(value), dtype, shape)  # str distinguishes -0.0 from 0.0
        cache = self.mlir.attributes
        found = cache.get(key)
        if found is None:
            found = self._make_splat(value, dtype, shape)
            cache[key] = found
        return found

    def _make_splat(self, value: Number, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        ir = self.mlir.ir
        type_, element = self.type(dtype, shape), self.mlir.element(dtype)
        if dtype.is_complex:
            import numpy as np

            kind = np.complex64 if dtype == torch.complex64 else np.complex128
            return ir.DenseElementsAttr.get(np.array(value, kind), type=type_)
        if isinstance(value, complex):
            value = bool(value) if dtype == torch.bool else value.real
        if dtype == torch.bool:
            item = ir.BoolAttr.get(bool(value))
        elif dtype.is_floating_point:
            item = ir.FloatAttr.get(element, float(value))
        else:
            item = ir.IntegerAttr.get(element, _as_int(value, dtype))
        return ir.DenseElementsAttr.get_splat(type_, item)

    def _splat_of(self, x: Value) -> Any:
        """The element attribute of a splat constant, else None."""
        owner = x.owner
        if getattr(owner, "name", None) != "stablehlo.constant" or x.is_complex:
            return None  # jaxlib has no Python class for the attribute of complex ones
        value = owner.attributes["value"]
        return value.get_splat_value() if value.is_splat else None


def _common_shape(shapes: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """torch.broadcast_shapes, which would import PyTorch's reference modules (a second)."""
    common: list[int] = []
    for shape in shapes:
        common = [1] * (len(shape) - len(common)) + common
        for i, n in enumerate(shape, len(common) - len(shape)):
            if n != 1 and common[i] not in (1, n):
                raise ValueError(f"shapes {sorted(shapes)} do not broadcast")
            common[i] = common[i] if n == 1 else n
    return tuple(common)


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher == torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def _as_int(value: int | float, dtype: torch.dtype) -> int:
    """`value` wrapped to the dtype's width, signed if 64 bits wide, as MLIR takes it."""
    if isinstance(value, float) and not -9.3e18 < value < 9.3e18:
        return torch.iinfo(dtype).min  # as the CPU's conversion of nan, inf and overflow
    bits = dtype.itemsize * 8
    number = int(value) & ((1 << bits) - 1)
    signed = dtype.is_signed or bits == 64
    return number - (1 << bits) if signed and number >> (bits - 1) else number
