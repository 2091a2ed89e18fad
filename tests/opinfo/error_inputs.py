"""Calls that are errors: those that PyTorch's tables of operators and of modules have.

Each is made on the CPU and on the device. The device has to raise an error of the same type at the
call; where the CPU's words are those that the table expects, in words that it expects, too.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_modules import ModuleErrorEnum, module_db
from torch.testing._internal.opinfo.core import OpInfo

from tests.opinfo.compare import DEVICE, copied


@dataclass(frozen=True)
class WrongCall:
    """A call, to be made on a device of that name."""

    name: str
    call: Callable[[str], Any]
    regex: str


@dataclass(frozen=True)
class Difference:
    """How the device differs from the CPU: "accepts", "raises" (another type) or "words"."""

    kind: str
    message: str


# What only the data tell: the number of the call in its entry, and why it is accepted. With
# LAZYXLA_CHECK_INDICES these are refused like the others.
_INDEX = "an index out of range is data: XLA clamps it, see docs/semantics.md"
_WEIGHTS = "the weights are data, see docs/semantics.md"
DATA_DEPENDENT: dict[str, str] = {
    "gather 4": _INDEX,
    "scatter 3": _INDEX,
    "scatter_add 3": _INDEX,
    "Embedding 0 in training": _INDEX,
    "Embedding 0 in inference": _INDEX,
    **{f"multinomial {number}": _WEIGHTS for number in range(7, 21)},
}


def of_operator(name: str, op: OpInfo) -> Iterator[WrongCall]:
    """The calls of an entry of the table of operators."""
    if op.error_inputs_func is None:
        return
    for number, wrong in enumerate(op.error_inputs("cpu")):

        def call(device: str, sample: Any = wrong.sample_input) -> Any:
            moved = copied(op, sample, device)
            with torch.device(device):  # where what has no tensor among its arguments is made
                return op(moved.input, *moved.args, **moved.kwargs)

        yield WrongCall(f"{name} {number}", call, wrong.error_regex)


def of_modules() -> Iterator[WrongCall]:
    """The calls of all entries of the table of modules; not what their constructors refuse."""
    for info in module_db:
        if info.module_error_inputs_func is None:
            continue
        for training in (True, False):
            wrong_calls = info.module_error_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
            )
            for number, wrong in enumerate(wrong_calls):
                if wrong.error_on is not ModuleErrorEnum.FORWARD_ERROR:
                    continue
                made, inputs = wrong.module_error_input, wrong.module_error_input.forward_input
                arguments = made.constructor_input
                module = info.module_cls(*arguments.args, **arguments.kwargs).train(training)

                def call(device: str, module: Any = module, inputs: Any = inputs) -> Any:
                    moved = torch.utils._pytree.tree_map_only(
                        torch.Tensor, lambda x: x.to(device), (inputs.args, inputs.kwargs)
                    )
                    return copy.deepcopy(module).to(device)(*moved[0], **moved[1])

                mode = "training" if training else "inference"
                name = f"{info.module_cls.__name__} {number} in {mode}"
                yield WrongCall(name, call, wrong.error_regex)


def error_on(device: str, wrong: WrongCall) -> Exception | None:
    """What the call raises there, if anything."""
    try:
        wrong.call(device)
    except Exception as error:
        return error
    return None


def difference(wrong: WrongCall, theirs: Exception) -> Difference | None:
    """How the device differs from a CPU that raises `theirs`, if it does."""
    ours = error_on(DEVICE, wrong)
    expected = f"{type(theirs).__name__}: {theirs}"
    if ours is None:
        return Difference("accepts", f"no error instead of {expected}")
    if type(ours) is not type(theirs):
        return Difference("raises", f"{type(ours).__name__}: {ours} instead of {expected}")
    if re.search(wrong.regex, str(theirs)) and not re.search(wrong.regex, str(ours)):
        return Difference("words", f"{ours} instead of {expected}")
    return None
