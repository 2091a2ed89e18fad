"""Numbers among an operator's arguments, and the runtime buffers that variable ones live in."""

from __future__ import annotations

from typing import Any

import torch

from lazyxla.lowering.program import SlotSpec


class Scalar:
    """A number that a rule takes as a 0-dim value (`Builder.value`) or as a Python number.

    `float(s)`, `int(s)`, `bool(s)`, `complex(s)` and `s.item()` build the number into the program:
    the slot becomes static and every further value of it costs a compilation. Asking whether it is
    1 by `Builder.is_const(s, 1)` has no price. A variable slot can become static, too (a rule may
    want the number only if it is not 1); the module is then built anew with its present value.

    A complex number is made of two slots, `parts`: its real and its imaginary part.
    """

    __slots__ = ("dtype", "number", "parts", "slot", "table", "variable", "wrapped")

    def __init__(self, spec: SlotSpec, slot: int = -1, table: SlotTable | None = None) -> None:
        self.dtype = spec.dtype
        self.wrapped = spec.wrapped
        self.variable = spec.variable
        self.number = spec.value
        self.slot = slot
        self.table = table
        self.parts: tuple[Scalar, Scalar] | None = None

    @classmethod
    def of_parts(cls, real: Scalar, imaginary: Scalar) -> Scalar:
        """The complex number of two slots; the dtype of the first is the number's."""
        number = complex(real.number, imaginary.number)
        variable = real.variable or imaginary.variable
        made = cls(SlotSpec(number, real.dtype, real.wrapped, variable))
        made.parts = real, imaginary
        return made

    def item(self) -> Any:
        for part in self.parts or ():
            part.item()
        if self.table is not None:
            self.table.static.add(self.slot)
        return self.number

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __repr__(self) -> str:
        kind = "variable" if self.variable else repr(self.number)
        return f"Scalar({kind}, {self.dtype})"


def wrap_number(number: int | float | bool | complex) -> Scalar:
    """A Python number as a Scalar that belongs to no slot."""
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
    return Scalar(SlotSpec(number, kinds[type(number)], True, False))


def plain(arg: Any) -> Any:
    """An argument with Python numbers in place of its Scalars, which become static."""
    if isinstance(arg, (list, tuple)):
        return tuple(plain(a) for a in arg)
    return arg.item() if isinstance(arg, Scalar) else arg


class SlotTable:
    """A program's slots: their Scalars, the runtime buffers, and which slots became static."""

    def __init__(self, slots: list[SlotSpec]) -> None:
        self.static: set[int] = set()
        self.scalars = [Scalar(spec, number, self) for number, spec in enumerate(slots)]
        for number, spec in enumerate(slots):
            # Else a constant that belongs to the operator, which has no second slot.
            if spec.dtype.is_complex and not isinstance(spec.value, complex):
                real, imaginary = self.scalars[number : number + 2]
                self.scalars[number] = Scalar.of_parts(real, imaginary)
        self.floats: list[int] = []
        self.ints: list[int] = []
        for number, spec in enumerate(slots):
            if spec.variable:
                is_float = spec.dtype.is_floating_point or spec.dtype.is_complex
                (self.floats if is_float else self.ints).append(number)
        self._places = {n: (torch.float64, i) for i, n in enumerate(self.floats)}
        self._places |= {n: (torch.int64, i) for i, n in enumerate(self.ints)}

    def place(self, slot: int) -> tuple[torch.dtype, int]:
        """The buffer (by dtype: float64 or int64) and the index in it of a variable slot."""
        return self._places[slot]
