"""Random programs over views and in-place writes, run on the CPU and on the device side by side.

A program is a list of lines of Python over tensors t0, t1, ...; each line is chosen by looking at
the CPU's tensors, executed in both worlds, and followed by a comparison of everything that can be
compared without computing: sizes, strides, storage offsets, version counters, aliasing. Values are
compared at the lines that read and at the end. A failing program is shown as the text it is.

What order of evaluation leaves undefined is not generated: writes to memory that overlaps itself
(but for expanded tensors, which PyTorch refuses to write), and writes from memory that overlaps the
target in part. Neither are the bits of floating-point numbers, as XLA may give a zero another sign.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lazyxla

INITIAL = [
    "({data} % 7 - 3).to(torch.{dtype}).reshape(2, 3)",
    "({data} % 7 - 3).to(torch.{dtype}).reshape(4, 6)",
    "({data} % 5 - 2).to(torch.{dtype}).reshape(2, 3, 4)",
    "({data} % 5 - 2).to(torch.{dtype}).reshape(2, 3, 4).mT",
    "({data} % 5 - 2).to(torch.{dtype}).reshape(1, 2, 3, 4).contiguous("
    "memory_format=torch.channels_last)",
]
NUMELS = [6, 24, 24, 24, 24]
DTYPES = ["float32", "float32", "int64", "int32", "bool", "complex64", "bfloat16"]
BIT_VIEWS = {
    torch.int64: ["int32", "int16", "uint8"],
    torch.int32: ["int64", "int16", "uint8"],
    torch.int16: ["int32", "uint8"],
    torch.uint8: ["int16", "int8"],
}
MAX_NUMEL = 200

Pick = Callable[[list[Any]], Any]


def addresses(tensor: torch.Tensor) -> torch.Tensor:
    """The byte addresses of a tensor's elements within its storage, one row per element."""
    first = torch.tensor(tensor.storage_offset())
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        shape = [1] * tensor.dim()
        shape[dim] = size
        first = first + (torch.arange(size) * stride).reshape(shape)
    item = tensor.element_size()
    return (first.reshape(-1, 1) * item + torch.arange(item)).reshape(-1, item)


def layout(tensor: torch.Tensor) -> list[int]:
    """The strides that mean something: where PyTorch chooses strides for a new tensor, its CPU
    kernels and its own meta functions differ in dimensions of size 1."""
    return [s for size, s in zip(tensor.shape, tensor.stride()) if size > 1 and tensor.numel()]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class World:
    """The tensors of one device."""

    def __init__(self, device: str) -> None:
        self.names: dict[str, Any] = {"torch": torch, "device": device}

    def run(self, code: Any) -> Exception | None:
        try:
            exec(code, self.names)
        except Exception as error:
            return error
        return None

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.names[name]


class RandomProgram:
    """One program; ``pick`` chooses an element of a list."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.cpu, self.device = World("cpu"), World("lazyxla")
        self.live: list[str] = []
        self.lines: list[str] = []
        self.made = 0

    def run(self, steps: int) -> None:
        for _ in range(self.pick([1, 2, 2])):
            self.start()
        for _ in range(steps):
            step, name = self.pick(STEPS), self.pick(self.live)
            step(self, name, self.cpu[name])
        for name in self.live:
            self.read(name, self.cpu[name])

    def forget(self) -> None:
        """Drops all tensors: what a failed program has recorded must not run with the next one."""
        self.cpu.names.clear()
        self.device.names.clear()

    # --- Lines -----------------------------------------------------------------------------------

    def line(self, text: str) -> bool:
        """Executes a line in both worlds and compares; False if both refused it."""
        self.lines.append(text)
        code = compile(text, "<program>", "exec")
        theirs, ours = self.cpu.run(code), self.device.run(code)
        assert type(ours) is type(theirs), f"device: {ours!r}\nCPU: {theirs!r}"
        self.compare_metadata()
        return theirs is None

    def define(self, expression: str) -> None:
        name = f"t{self.made}"
        self.made += 1
        if self.line(f"{name} = {expression}"):
            # Empty tensors end here: PyTorch's CPU kernels and meta functions give what operators
            # make of them different strides.
            if not 0 < self.cpu[name].numel() <= MAX_NUMEL:
                return
            self.live.append(name)
            self.compare_metadata()

    def write(self, name: str, text: str) -> None:
        """A line that writes ``name``; not generated if the outcome is undefined."""
        tensor = self.cpu[name]
        if self.is_expanded(tensor) or not self.overlaps_itself(tensor):
            self.line(text)

    def start(self) -> None:
        which = self.pick(list(range(len(INITIAL))))
        text = INITIAL[which].format(data=f"torch.arange({NUMELS[which]})", dtype=self.pick(DTYPES))
        self.define(f"({text}).to(device)")

    def source(self, target: str, name: str) -> str:
        """An expression of a tensor to combine with ``target``: a copy if the two overlap."""
        a, b = self.cpu[target], self.cpu[name]
        if storage_of(a) != storage_of(b):
            return name
        same = (a.stride(), a.storage_offset(), a.shape, a.dtype) == (
            b.stride(),
            b.storage_offset(),
            b.shape,
            b.dtype,
        )
        if same or not set(addresses(a).flatten().tolist()) & set(addresses(b).flatten().tolist()):
            return name
        return f"{name}.clone()"

    def other(self, target: str) -> str:
        """A tensor that broadcasts to ``target`` and has no higher category of element type."""
        tensor = self.cpu[target]
        fitting = [
            name
            for name in self.live
            if torch.can_cast(self.cpu[name].dtype, tensor.dtype)
            and fits(self.cpu[name].shape, tensor.shape)
        ]
        return self.source(target, self.pick(fitting)) if fitting else self.number(tensor)

    def number(self, tensor: torch.Tensor) -> str:
        return self.pick(["True", "False"] if tensor.dtype == torch.bool else ["1", "2", "-1", "3"])

    @staticmethod
    def is_expanded(tensor: torch.Tensor) -> bool:
        return any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride()))

    @staticmethod
    def overlaps_itself(tensor: torch.Tensor) -> bool:
        return len(addresses(tensor)[:, 0].unique()) < tensor.numel()

    # --- Comparing -------------------------------------------------------------------------------

    def compare_metadata(self) -> None:
        for name in self.live:
            ours, theirs = self.device[name], self.cpu[name]
            assert ours.dtype == theirs.dtype, name
            assert ours.shape == theirs.shape, name
            assert layout(ours) == layout(theirs), name
            assert ours.storage_offset() == theirs.storage_offset(), name
            assert ours._version == theirs._version, name

    def read(self, name: str, tensor: torch.Tensor) -> None:
        self.lines.append(f"print({name})")
        ours = self.device[name].cpu()
        torch.testing.assert_close(ours, tensor, equal_nan=True, msg=lambda m: f"{name}: {m}")

    # --- Steps that look -------------------------------------------------------------------------

    def sync(self, name: str, tensor: torch.Tensor) -> None:
        self.lines.append("lazyxla.sync()")
        lazyxla.sync()

    def delete(self, name: str, tensor: torch.Tensor) -> None:
        if len(self.live) > 1:
            self.live.remove(name)
            self.line(f"del {name}")

    def create(self, name: str, tensor: torch.Tensor) -> None:
        other = self.other(name)
        kind = self.pick(["clone", "contiguous", "add", "mul", "to", "where", "cat", "sum"])
        if kind in ("clone", "contiguous"):
            self.define(f"{name}.{kind}()")
        elif kind in ("add", "mul"):
            self.define(f"torch.{kind}({name}, {other})")
        elif kind == "to":
            self.define(f"{name}.real.to(torch.{self.pick(['float32', 'int32', 'bool'])})")
        elif kind == "where":
            self.define(f"torch.where({name} == {other}, {name}, {self.number(tensor)})")
        elif kind == "sum":
            self.define(f"{name}.sum({self.dim(tensor)}, keepdim=True)" if tensor.dim() else name)
        elif tensor.dim():
            self.define(f"torch.cat([{name}, {name}], {self.dim(tensor)})")

    # --- Steps that view -------------------------------------------------------------------------

    def dim(self, tensor: torch.Tensor) -> int:
        return self.pick(list(range(-tensor.dim(), tensor.dim())) or [0])

    def view(self, name: str, tensor: torch.Tensor) -> None:
        expression = self.pick(VIEWS)(self, tensor)
        if expression is not None:
            self.define(expression.format(name))

    def pieces(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.dim():
            return
        dim = self.dim(tensor)
        call = self.pick([f"split(2, {dim})", f"chunk(3, {dim})", f"unbind({dim})"])
        which = self.pick([0, -1])
        self.define(f"{name}.{call}[{which}]")

    def view_of_bits(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.complex64:
            self.define(f"torch.view_as_real({name})")
        elif tensor.dtype == torch.float32:
            self.define(f"torch.view_as_complex({name})")
        elif tensor.dtype in BIT_VIEWS:
            self.define(f"{name}.view(torch.{self.pick(BIT_VIEWS[tensor.dtype])})")

    def reshape_in_place(self, name: str, tensor: torch.Tensor) -> None:
        dim = self.dim(tensor)
        self.line(
            f"{name}."
            + self.pick(
                [f"transpose_({dim}, 0)", f"unsqueeze_({dim})", "squeeze_()", f"squeeze_({dim})"]
            )
        )

    # --- Steps that write ------------------------------------------------------------------------

    def arithmetic(self, name: str, tensor: torch.Tensor) -> None:
        operators = ["add_", "mul_", "add_alpha", "neg_"]
        if tensor.dtype not in (torch.bool, torch.complex64):
            operators += ["abs_", "clamp_"]
        operator = self.pick(operators)
        if operator == "add_alpha":
            call = f"add_({self.other(name)}, alpha={self.number(tensor)})"
        elif operator in ("neg_", "abs_"):
            call = f"{operator}()"
        elif operator == "clamp_":
            call = "clamp_(-2, 5)"
        else:
            call = f"{operator}({self.other(name)})"
        self.write(name, f"{name}.{call}")

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        number = self.number(tensor)
        self.write(name, f"{name}." + self.pick([f"fill_({number})", "zero_()", "zero_()"]))

    def copy(self, name: str, tensor: torch.Tensor) -> None:
        source = self.other(name)
        if source.startswith("t"):
            self.write(name, f"{name}.copy_({source})")

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.dim():
            return
        index = self.pick(["0", "-1", "1:", "::2", "..., 0", "..., 1:3", "..., ::2", "None, 0"])
        self.write(name, f"{name}[{index}] = {self.number(tensor)}")

    def masked_fill(self, name: str, tensor: torch.Tensor) -> None:
        self.write(name, f"{name}.masked_fill_({name} == 1, {self.number(tensor)})")

    def out(self, name: str, tensor: torch.Tensor) -> None:
        other = self.other(name)
        if other.startswith("t") and self.cpu[other.split(".")[0]].shape == tensor.shape:
            self.write(name, f"torch.add({other}, {other}, out={name})")


def fits(shape: torch.Size, target: torch.Size) -> bool:
    """Whether ``shape`` broadcasts to ``target``."""
    return len(shape) <= len(target) and all(
        size in (1, wanted) for size, wanted in zip(reversed(shape), reversed(target))
    )


def _slice(p: RandomProgram, t: torch.Tensor) -> str | None:
    return "{}[" + p.pick(["1:", "::2", "..., 1:", "..., ::2", "..., :2", "1::3"]) + "]"


def _narrow(p: RandomProgram, t: torch.Tensor) -> str | None:
    if not t.numel() or not t.dim():
        return None
    dim = p.dim(t)
    start = p.pick([0, t.shape[dim] - 1, t.shape[dim] // 2])
    return f"{{}}.narrow({dim}, {start}, {p.pick([1, t.shape[dim] - start])})"


def _view(p: RandomProgram, t: torch.Tensor) -> str | None:
    shapes = ["-1", "2, -1", "-1, 3", "1, -1, 2", "2, 3, -1"]
    return f"{{}}.{p.pick(['view', 'reshape'])}({p.pick(shapes)})" if t.numel() else None


def _expand(p: RandomProgram, t: torch.Tensor) -> str | None:
    sizes = [p.pick([3, 1]) if size == 1 else -1 for size in t.shape]
    return f"{{}}.expand({[p.pick([2, 1]), *sizes]})"


def _permute(p: RandomProgram, t: torch.Tensor) -> str | None:
    rest = list(range(t.dim()))
    order = [rest.pop(p.pick(list(range(len(rest))))) for _ in range(t.dim())]
    return f"{{}}.permute({order})"


def _as_strided(p: RandomProgram, t: torch.Tensor) -> str | None:
    elements = t.untyped_storage().nbytes() // t.element_size()
    which = p.pick([((2, 2), (2, 1), 0), ((3,), (2,), 1), ((2, 3), (1, 2), 0), ((2, 2), (1, 1), 1)])
    sizes, strides, offset = which
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    return f"{{}}.as_strided({sizes}, {strides}, {offset})" if last < elements else None


VIEWS: list[Callable[[RandomProgram, torch.Tensor], str | None]] = [
    lambda p, t: f"{{}}.transpose({p.dim(t)}, {p.dim(t)})",
    lambda p, t: f"{{}}.select({p.dim(t)}, {p.pick([0, 1, -1])})",
    _slice,
    _slice,
    _narrow,
    _view,
    _view,
    _expand,
    _permute,
    _as_strided,
    lambda p, t: f"{{}}.unsqueeze({p.dim(t)})",
    lambda p, t: p.pick(["{}.squeeze()", f"{{}}.squeeze({p.dim(t)})"]),
    lambda p, t: f"{{}}.unfold({p.dim(t)}, 2, {p.pick([1, 2])})",
    lambda p, t: f"{{}}.diagonal({p.pick([0, 1, -1])}, -1, {p.pick([0, -2])})",
    lambda p, t: p.pick(["{}.flatten()", "{}.flatten(-2)", "{}.flatten(0, 1)"]),
    lambda p, t: f"{{}}.movedim({p.dim(t)}, {p.dim(t)})",
    lambda p, t: p.pick(["{}.detach()", "{}[...]", "{0}.view_as({0})", "{}.mT"]),
]

STEPS: list[Callable[[RandomProgram, str, torch.Tensor], None]] = [
    RandomProgram.view,
    RandomProgram.view,
    RandomProgram.view,
    RandomProgram.view,
    RandomProgram.pieces,
    RandomProgram.view_of_bits,
    RandomProgram.reshape_in_place,
    RandomProgram.arithmetic,
    RandomProgram.arithmetic,
    RandomProgram.fill,
    RandomProgram.copy,
    RandomProgram.assign,
    RandomProgram.masked_fill,
    RandomProgram.out,
    RandomProgram.create,
    RandomProgram.create,
    RandomProgram.sync,
    RandomProgram.read,
    RandomProgram.delete,
]
