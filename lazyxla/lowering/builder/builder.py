"""The Builder itself: what belongs to one module and to the node being lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lazyxla.lowering.builder.attention import Attention
from lazyxla.lowering.builder.indexing import Indexing
from lazyxla.lowering.jax_call import call_jax
from lazyxla.lowering.mlir import Mlir
from lazyxla.lowering.program import Program, ReplicaGroups, Settings, Target, TensorSpec
from lazyxla.lowering.scalar import Scalar, SlotTable
from lazyxla.lowering.streams import philox_bits
from lazyxla.lowering.value import Dialect, Value, unwrapped

Apply = Callable[["Builder", str, tuple[Any, ...]], list[Any]]
"""Lowers an operator, by its name, on its schema's arguments."""


class Builder(Indexing):
    """Writes one module. Rules use the inherited methods and read the attributes below.

    hlo, chlo: the dialect modules (`b.hlo.add(x, y)`, `b.chlo.erf(x)`).
    target:    what the module is for; its `platform` is at hand as b.platform.
    outputs:   expected outputs (TensorSpec) of the node being lowered.
    rng:       (seed, ordinal) of a random operator as 0-dim uint64 values.
    attention: how the platform computes attention.
    gathers_what_is_not_finite: whether linear maps by matmuls are by gathering instead if they are
        of infinities or NaNs, which a matmul spreads.
    """

    attention = Attention()
    gathers_what_is_not_finite = False

    def __init__(
        self,
        mlir: Mlir,
        target: Target,
        slots: SlotTable,
        apply: Apply,
        module: Any,
        *,
        trying: bool = False,
    ) -> None:
        self.mlir = mlir
        self.hlo: Any = Dialect(self, mlir.hlo)
        self.chlo: Any = Dialect(self, mlir.chlo)
        self.target = target
        self.platform = target.platform
        self.slots = slots
        self.module = module
        self._apply = apply
        self.buffers: dict[torch.dtype, Value] = {}
        self.outputs: tuple[TensorSpec, ...] = ()
        self._rng: tuple[Scalar | Value, Scalar | Value] | None = None
        self.symbols: dict[Any, str] = {}  # merged JAX functions: trace key -> name
        self.depth = 0  # nesting of decompositions
        self.salt = 0  # number of the random operator within a decomposition
        self.callees: dict[str, Any] = {}  # name -> function
        self.host_calls: list[str] = []  # the operators that the module calls on the host
        self.trying = trying  # the module is built to see whether it can be
        self.settings = Settings.current()  # of the node that is lowered
        self.annotations = None
        self.groups: Mapping[str, ReplicaGroups] = {}  # as in Program
        self.notes: dict[Any, Any] = {}  # what one rule leaves for another, by MLIR's values

    @property
    def rng(self) -> tuple[Value, Value]:
        if self._rng is None:
            raise ValueError("this operator is not tagged nondeterministic_seeded")
        seed, ordinal = (self.value(s, torch.int64) for s in self._rng)
        if self.salt > 1:
            # Random operators of one decomposition share the ordinal, so each has its own seed.
            seed = self.hlo.add(seed, self.constant(self.salt * 0x9E3779B97F4A7C15, torch.int64))
        return self.bitcast(seed, torch.uint64), self.bitcast(ordinal, torch.uint64)

    @contextmanager
    def stream(self, seed: Value, ordinal: Value) -> Iterator[None]:
        """Random operators within draw from this stream, two 0-dim uint64 values."""
        before = self._rng
        self._rng = self.bitcast(seed, torch.int64), self.bitcast(ordinal, torch.int64)
        try:
            yield
        finally:
            self._rng = before

    def enter_node(
        self, outputs: tuple[TensorSpec, ...], rng: tuple[Scalar, Scalar] | None
    ) -> None:
        """Sets what belongs to the node that is lowered next."""
        self.outputs = outputs
        self._rng = rng

    @property
    def takes_host_calls(self) -> bool:
        """Whether programs can call operators on the host."""
        return False

    def in_fewer_dimensions(self, program: Program) -> Program | None:
        """The same program on the same elements, where the platform computes that faster."""
        return None

    def finish(self) -> None:
        """What the platform changes in the complete module."""

    def computed_once(self, x: Value) -> Value:
        """The value, not computed again by each reader where the compiler does that badly."""
        return x

    def fft(self, function: Callable[..., Any], x: Value, **static: Any) -> Any:
        """`call_jax` of a Fourier transform."""
        return self.call_jax(function, x, **static)

    def windows(
        self, x: Value, dim: int, start: int, sizes: Sequence[int], strides: Sequence[int]
    ) -> Value | None:
        """The elements of overlapping windows over a dimension, in place of it: element (i, j) of
        the dimensions `sizes` is at start + i * strides[0] + j * strides[1] and so on. None if they
        are best gathered."""
        return None

    def maps_by_matmul(self, size: int, adjoint: bool) -> bool:
        """Whether a sparse linear map, or its adjoint, is best multiplied by as a matrix of `size`
        elements."""
        return size <= 1 << 20

    def interleaves_by_stacking(self, shape: Sequence[int]) -> bool:
        """Whether arrays become one of this shape, element by element in turns, best by stacking
        them along a new last dimension; else by padding each between its elements."""
        return True

    def random_bits(
        self, shape: Sequence[int], dtype: torch.dtype, seed: Value, ordinal: Value
    ) -> Value:
        """The first bits of a stream, uint32 or uint64; see streams.py."""
        return philox_bits(self, shape, dtype, seed, ordinal)

    def random_below(
        self, shape: Sequence[int], limit: Value, seed: Value, ordinal: Value
    ) -> Value:
        """Which of a stream's first numbers, uint32 without their last byte, are below a float32
        of shape ()."""
        numbers = self.random_bits(shape, torch.uint32, seed, ordinal) >> 8
        # Signed numbers convert faster; the top bit is zero by now.
        return self.bitcast(numbers, torch.int32).to(torch.float32) < limit

    def call_jax(self, function: Callable[..., Any], *xs: Any, **static: Any) -> Any:
        """Calls a function on JAX arrays: traced once per operand types, merged in as a function.

        Values become traced arrays, Scalars and numbers 0-dim ones; `static` keyword arguments are
        passed as they are and must be hashable. Returns one value, or a list if the function
        returns a tuple or list.
        """
        return call_jax(self, function, xs, static)

    def function(
        self,
        name: str,
        types: Sequence[Any],
        results: Callable[[list[Value]], list[Value]],
        visibility: str = "private",
    ) -> Any:
        """A function of arguments of these MLIR types, whose results are built from their
        values."""
        world = self.mlir
        with world.ir.InsertionPoint(self.module.body):
            function = world.func.FuncOp(name, (types, []), visibility=visibility)
            block = function.add_entry_block()
        with world.ir.InsertionPoint(block):
            returned = results(self.wrap(block.arguments))
            world.func.ReturnOp(unwrapped(returned))
        function_type = world.ir.FunctionType.get(types, [r.type for r in returned])
        function.attributes["function_type"] = world.ir.TypeAttr.get(function_type)
        return function

    def call(self, function: Any, values: Sequence[Value], inlined: bool = True) -> list[Value]:
        """Calls a function of the module. `inlined`: the compiler may take the call apart."""
        call = self.mlir.func.CallOp(function, unwrapped(values))
        if not inlined:
            ir = self.mlir.ir
            call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(
                {"inlineable": ir.StringAttr.get("false")}
            )
        return self.wrap(call.results)

    def apply(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        """Lowers operator `name` on values and Scalars; the results have the types of
        `self.outputs`."""
        return self._apply(self, name, args)

    def lower_op(self, name: str, *args: Any, outputs: Sequence[TensorSpec] | None = None) -> Any:
        """Lowers another operator within a rule; `args` are all its schema arguments, in order.

        `outputs` are that operator's outputs; left out, they are those of the node being lowered.
        """
        before = self.outputs
        try:
            self.outputs = tuple(before if outputs is None else outputs)
            results = self.apply(name, args)
        finally:
            self.outputs = before
        return results[0] if len(results) == 1 else results
