"""Many operator calls checked by one compiled program: compiling costs far more than running.

batch = Batch()
batch.add("aten::add.Tensor", x, y, alpha=2)
batch.check()
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lazyxla.lowering import Node, Program, Ref, Slot
from tests.lowering.harness import Recorded, execute, record

INF, NAN = float("inf"), float("nan")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
COMPLEX = (torch.complex64,)
REAL = FLOATS + INTEGERS
ALL = (*REAL, torch.bool, *COMPLEX)


class Batch:
    """Calls collected with `add`; `check` compares all of them with PyTorch's results at once."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Recorded]] = []

    def add(self, op: str, *args: Any, rounded_once: bool = False, **kwargs: Any) -> None:
        """Adds a call in torch's form.

        With `rounded_once` the reference for 16-bit floats is the operator on float64, its result
        rounded to 16 bits: for operators whose CPU kernels round to 16 bits on the way as well.
        """
        recorded = record(op, *args, **kwargs)
        if rounded_once:
            exact = record(op, *_in_double(args), **_in_double(kwargs)).expected
            dtypes = [t.dtype for t in recorded.expected]
            recorded = recorded._replace(
                expected=[t.to(dtype) for t, dtype in zip(exact, dtypes, strict=True)]
            )
        shown = ", ".join([*map(_show, args), *(f"{k}={_show(v)}" for k, v in kwargs.items())])
        self.calls.append((f"{op}({shown})", recorded))

    def check(self) -> None:
        """Runs the calls with their numbers as constants, then as runtime inputs where rules allow
        that.
        """
        assert self.calls, "an empty batch checks nothing"
        program, inputs = self._merge()
        static = self._compare(program, inputs)
        slots = [
            s._replace(
                variable=i not in static and s.dtype != torch.bool and not s.dtype.is_complex
            )
            for i, s in enumerate(program.slots)
        ]
        if any(s.variable for s in slots):
            self._compare(program._replace(slots=slots), inputs)

    def _merge(self) -> tuple[Program, list[torch.Tensor]]:
        programs = [recorded.program for _, recorded in self.calls]
        inputs = [t for _, recorded in self.calls for t in recorded.inputs]
        merged = Program([s for p in programs for s in p.inputs], [], [], [], {})
        first_input, first_output = 0, len(inputs)
        for program in programs:
            count, shift = len(program.inputs), len(merged.slots)
            (node,) = program.nodes
            args = tuple(_shift(a, first_input, shift) for a in node.args)
            merged.nodes.append(Node(node.op, args, node.outputs, node.rng))
            outputs = len(node.outputs)
            merged.outputs.extend(Ref(first_output + i) for i in range(outputs))
            merged.slots.extend(program.slots)
            first_input += count
            first_output += outputs
        return merged, inputs

    def _compare(self, program: Program, inputs: list[torch.Tensor]) -> set[int]:
        results, static = execute(program, inputs)
        left, failures = iter(results), []
        for name, recorded in self.calls:
            for number, wanted in enumerate(recorded.expected):
                got = next(left)
                try:
                    torch.testing.assert_close(
                        got, wanted.contiguous(), equal_nan=True, check_stride=False
                    )
                except AssertionError as error:
                    failures.append(f"{name} -> {number}: {error}\n{got}\nexpected {wanted}")
        assert not failures, "\n".join(failures)
        return static


def each(dtypes: Iterable[torch.dtype], call: Callable[["Batch", torch.dtype], None]) -> None:
    """Checks the calls that `call(batch, dtype)` adds for every dtype."""
    batch = Batch()
    for dtype in dtypes:
        call(batch, dtype)
    batch.check()


def samples(dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Values worth testing: zeros, signs, halves, and for floats nan, infinities, great and small
    ones.
    """
    if dtype == torch.bool:
        return torch.tensor([False, True, True, False])
    if dtype.is_complex:
        parts = torch.tensor([0.0, 0.5, -1.5, 2.0, -0.25, 1.0])
        return torch.complex(parts * scale, parts.flip(0) * scale).to(dtype)
    if dtype.is_floating_point:
        finite = [0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, -2.5, 3.0, 0.3, -0.7, 10.0, 1e-3]
        return torch.tensor([v * scale for v in finite] + [NAN, INF, -INF]).to(dtype)
    if dtype == torch.uint8:
        return torch.tensor([0, 1, 2, 3, 7, 100, 255], dtype=dtype)
    return torch.tensor([0, 1, -1, 2, -3, 7, -100, 12345], dtype=dtype)


def grid(dtype: torch.dtype, other: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of samples, as two tensors that broadcast against each other."""
    return samples(dtype).unsqueeze(1), samples(other or dtype)


def _shift(arg: Any, first_input: int, first_slot: int) -> Any:
    if isinstance(arg, Ref):
        return Ref(arg + first_input)
    if isinstance(arg, Slot):
        return Slot(arg + first_slot)
    if isinstance(arg, list):
        return [_shift(a, first_input, first_slot) for a in arg]
    return arg


def _in_double(tree: Any) -> Any:
    """The arguments with float64 in place of 16-bit floats."""
    return tree_map_only(
        torch.Tensor,
        lambda t: t.double() if t.is_floating_point() and t.dtype.itemsize == 2 else t,
        tree,
    )


def _show(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor):
        return f"[{', '.join(map(_show, arg))}]"
    return repr(arg)
