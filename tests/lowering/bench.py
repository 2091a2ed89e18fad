"""Runs a rule that is no operator's: the builder's methods and values are tried with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lazyxla.lowering import Node, Program, Ref, Slot, SlotSpec, TensorSpec, lower_to_text, registry
from tests.lowering.harness import execute

Rule = Callable[..., Any]


class Bench:
    """Runs a rule on tensors and Scalars."""

    def program(self, function: Rule, args: tuple[Any, ...], expected: list[Tensor]) -> Program:
        registry._rules["test::op"] = function
        tensors = [a for a in args if isinstance(a, Tensor)]
        slots = [a for a in args if isinstance(a, SlotSpec)]
        refs, numbers = itertools.count(), itertools.count()
        bound = tuple(
            Ref(next(refs)) if isinstance(a, Tensor) else Slot(next(numbers)) for a in args
        )
        specs = tuple(TensorSpec(t.dtype, tuple(t.shape)) for t in expected)
        outputs = [Ref(len(tensors) + i) for i in range(len(specs))]
        inputs = [TensorSpec(t.dtype, tuple(t.shape)) for t in tensors]
        return Program(inputs, [Node("test::op", bound, specs)], outputs, slots, {})

    def check(self, function: Rule, *args: Any, expected: Any) -> None:
        wanted = [expected] if isinstance(expected, Tensor) else list(expected)
        program = self.program(function, args, wanted)
        results, _ = execute(program, [a for a in args if isinstance(a, Tensor)])
        for result, tensor in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, tensor.contiguous(), equal_nan=True)

    def text(self, function: Rule, *args: Tensor, expected: Tensor) -> str:
        return lower_to_text(self.program(function, args, [expected]), "cpu")
