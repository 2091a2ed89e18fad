"""What a plan is made from: a graph without its data."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple


class SlotValue(NamedTuple):
    """The number in a scalar slot. `word`: its 64 bits. `is_index`: it is a position of elements.
    `optional`: it may be missing."""

    word: int
    is_index: bool
    optional: bool


class Operator(NamedTuple):
    """What is the same for all calls of a kind.

    Args:
        id: two calls of the same kind, and no others, have the same.
        size: how many operators it counts as: more for a graph that was traced.
        results: how many.
        in_optimizer: an optimizer's, whose first step is another one.
        is_collective: other processes take part.
    """

    name: str
    id: int
    size: int
    results: int
    in_optimizer: bool
    is_collective: bool


class Outline:
    """A graph's operators, by their positions in it, operands before users.

    Values are numbered: the inputs first, then each operator's results in turn.

    Args:
        inputs: dtype and shape of each input, as messages show them.
        operators: one for each position.
        operands: of each operator, numbers of values.
        slots: of each operator.
        outputs: numbers of values.
        made: contents of tensors made before data was read, and of none; numbers of values.
        aliases: per input the position in `outputs` that may take its memory over, or -1.
    """

    def __init__(
        self,
        inputs: list[str],
        operators: list[Operator],
        operands: list[Sequence[int]],
        slots: list[Sequence[SlotValue]],
        outputs: list[int],
        made: list[int],
        aliases: list[int],
    ) -> None:
        self.inputs = inputs
        self.operators = operators
        self.operands = operands
        self.slots = slots
        self.outputs = outputs
        self.made = made
        self.aliases = aliases
        self.ids = [operator.id for operator in operators]
        self.varies = [False] * len(operators)
        """Which operators are where graphs differ."""

    def __len__(self) -> int:
        return len(self.operators)

    @functools.cached_property
    def names(self) -> list[str]:
        return [operator.name for operator in self.operators]

    def makers(self) -> list[int]:
        """The operator that makes each value, -1 for an input."""
        makers = [-1] * len(self.inputs)
        for position, operator in enumerate(self.operators):
            makers += [position] * operator.results
        return makers

    @functools.cached_property
    def sources(self) -> list[list[int]]:
        """The makers of each operator's operands, -1 for inputs."""
        makers = self.makers()
        return [[makers[value] for value in operands] for operands in self.operands]
