"""MLIR for the whole process: a context, its dialects, and caches of types and attributes.

jaxlib is imported when a context is first entered. One thread at a time builds IR.

A context keeps every type and attribute that was ever made in it, so it is replaced by another when
they have become many.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazyxla.lowering.program import TensorSpec

# Kinds of element types: MLIR's constructors are looked up by name, since jaxlib is not loaded yet.
_SIGNLESS = {torch.bool: 1, torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_FLOATS = {
    torch.float16: "F16Type",
    torch.bfloat16: "BF16Type",
    torch.float32: "F32Type",
    torch.float64: "F64Type",
    torch.float8_e4m3fn: "Float8E4M3FNType",
    torch.float8_e4m3fnuz: "Float8E4M3FNUZType",
    torch.float8_e5m2: "Float8E5M2Type",
    torch.float8_e5m2fnuz: "Float8E5M2FNUZType",
    torch.float8_e8m0fnu: "Float8E8M0FNUType",
}
_COMPLEX = {torch.complex64: "F32Type", torch.complex128: "F64Type"}


class Mlir:
    """A context, the dialect modules (`hlo`, `chlo`, `func`) and the caches."""

    def __init__(self) -> None:
        from jaxlib.mlir import ir, passmanager
        from jaxlib.mlir._mlir_libs import _jax_mlir_ext
        from jaxlib.mlir.dialects import chlo, func, sdy, stablehlo

        self.ir: Any = ir
        self.hlo: Any = stablehlo
        self.chlo: Any = chlo
        self.func: Any = func
        self.passmanager: Any = passmanager
        self.context = ir.Context()
        upstream = ir.DialectRegistry()
        _jax_mlir_ext.register_dialects(upstream)
        self.context.append_dialect_registry(upstream)
        self.context.get_dialect_descriptor("func")  # loads it; the others stay unloaded
        stablehlo.register_dialect(self.context)
        chlo.register_dialect(self.context)
        sdy.register_dialect(self.context)  # JAX says with it how some calls are partitioned
        stablehlo.register_stablehlo_passes()
        with self.context:
            self._elements = {d: self._element_type(d) for d in self._dtypes()}
            self.unknown = ir.Location.unknown()
        self.highest_rank = 0  # of all types that were asked for
        self._types: dict[tuple[torch.dtype, tuple[int, ...]], Any] = {}
        self._specs: dict[Any, TensorSpec] = {}
        self._locations: dict[str, Any] = {}
        self.attributes: dict[Any, Any] = {}

    @staticmethod
    def _dtypes() -> list[torch.dtype]:
        return [*_SIGNLESS, *_UNSIGNED, *_FLOATS, *_COMPLEX]

    def _element_type(self, dtype: torch.dtype) -> Any:
        ir = self.ir
        if dtype in _SIGNLESS:
            return ir.IntegerType.get_signless(_SIGNLESS[dtype])
        if dtype in _UNSIGNED:
            return ir.IntegerType.get_unsigned(_UNSIGNED[dtype])
        if dtype in _FLOATS:
            return getattr(ir, _FLOATS[dtype]).get()
        return ir.ComplexType.get(getattr(ir, _COMPLEX[dtype]).get())

    def element(self, dtype: torch.dtype) -> Any:
        """The MLIR element type of a torch dtype."""
        try:
            return self._elements[dtype]
        except KeyError:
            raise TypeError(f"{dtype} has no XLA element type") from None

    def type(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        """tensor<shape x dtype>; needs the context to be entered."""
        key = (dtype, shape)
        found = self._types.get(key)
        if found is None:
            found = self.ir.RankedTensorType.get(shape, self.element(dtype))
            self.highest_rank = max(self.highest_rank, len(shape))
            self._types[key] = found
            self._specs[found] = TensorSpec(dtype, shape)
        return found

    def spec(self, type_: Any) -> TensorSpec:
        """dtype and shape of an MLIR tensor type."""
        found = self._specs.get(type_)
        if found is None:
            ranked = self.ir.RankedTensorType(type_)
            element = ranked.element_type
            dtype = next((d for d, e in self._elements.items() if e == element), None)
            if dtype is None:
                raise TypeError(f"{type_} has no torch dtype")
            self.highest_rank = max(self.highest_rank, ranked.rank)
            found = self._specs[type_] = TensorSpec(dtype, tuple(ranked.shape))
        return found

    def size(self) -> int:
        """How many objects the caches hold."""
        return len(self._specs) + len(self._locations) + len(self.attributes)

    def location(self, name: str) -> Any:
        """A location that names the operator; it shows up as op_name in profiles."""
        found = self._locations.get(name)
        if found is None:
            found = self._locations[name] = self.ir.Location.name(name, context=self.context)
        return found


_MOST = 4_000
"""Types, attributes and locations of a context: some 6 MB. Making another takes 1 ms."""

_lock = threading.RLock()
_current: Mlir | None = None


@contextmanager
def entered() -> Iterator[Mlir]:
    """The process's Mlir, for the calling thread alone; its context and a location are entered."""
    global _current
    with _lock:
        if _current is None or _current.size() > _MOST:
            _current = Mlir()
        world = _current
        with world.context, world.unknown:
            yield world
