"""Random programs whose tensors are spread over random meshes, beside the same on the CPU.

The lines of tests/random_programs.py, and more of them: what is spread is spread anew, replicated,
constrained within an expression, or looked at. The tensors of a program are in two groups, each
with a mesh of its own; operators take tensors of one group, since those of two meshes cannot meet.
"""

from __future__ import annotations

from typing import Any

import torch

import lazyxla
from tests.random_programs import STEPS, Pick, RandomProgram, storage_of

MESHES = [
    lazyxla.Mesh((4, 2), ("data", "model")),
    lazyxla.Mesh((2, 2, 2), ("a", "b", "c")),
    lazyxla.Mesh((8,), ("x",)),
    lazyxla.Mesh((3,), ("x",), [7, 0, 4]),
    lazyxla.Mesh((2,), ("x",), [2, 3]),
    lazyxla.Mesh((2, 3), ("data", "model"), [1, 2, 3, 5, 6, 7]),
    lazyxla.Mesh((1,), ("x",), [5]),
    lazyxla.Mesh((1, 4), ("data", "model"), [4, 5, 6, 7]),
]
SHAPES = [(2, 3), (4, 6), (2, 3, 4), (7, 5), (8, 6), (1, 9), (3,), (16,), (1,), ()]
DTYPES = [
    *("float32", "float32", "int64", "int32", "bool", "complex64", "bfloat16", "float16"),
    *("float64", "uint8", "int8"),
]

Geometry = tuple[Any, ...]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its memory, each element once."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size > 1 and stride != expected:
            return False
        expected *= size if size > 1 else 1
    return (
        tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def random_spec(
    pick: Pick, mesh: lazyxla.Mesh, tensor: torch.Tensor, *more: Any, joins: bool = True
) -> tuple[Any, ...]:
    """A spec over a mesh, each axis at most once; `joins`: a dimension may have two."""
    axes = list(mesh.axis_names)
    entries: list[Any] = []
    for _ in range(pick(list(range(tensor.dim() + 1)))):
        entry = pick([None, *axes, *more])
        if entry in axes:
            axes.remove(entry)
            if axes and joins and pick([True, False, False]):
                entry = (entry, axes.pop())
        entries.append(entry)
    return tuple(entries)


class ShardedProgram(RandomProgram):
    def __init__(self, pick: Pick) -> None:
        super().__init__(pick)
        self.meshes = [pick(MESHES), pick(MESHES)]
        self.group = 0  # of what is made now
        self.groups: dict[str, int] = {}
        self.asked: dict[int, tuple[Geometry, Any]] = {}  # by the CPU's storage
        self.kept: list[Any] = []  # the storages, so that no other is taken for one of them
        self.cpu.names |= {
            "shard": lambda x, group, spec: x,
            "constrain": lambda x, group, spec: x.clone(),
        }
        self.device.names |= {
            "shard": lambda x, group, spec: lazyxla.shard(x, self.meshes[group], spec),
            "constrain": lambda x, group, spec: lazyxla.constrain(x, self.meshes[group], spec),
        }
        self.lines.append(f"# {self.meshes}")

    def run(self, steps: int) -> None:
        for group in self.pick([(0,), (0, 0), (0, 1), (0, 0, 1)]):
            self.group = group
            self.start()
        for _ in range(steps):
            step, name = self.pick(SHARDED_STEPS), self.pick(self.live)
            self.group = self.groups[name]
            step(self, name, self.cpu[name])
            self.check_shardings()
        for name in self.live:
            self.read(name, self.cpu[name])
        self.check_shardings()

    def define(self, expression: str) -> None:
        self.groups[f"t{self.made}"] = self.group
        super().define(expression)

    def other(self, target: str) -> str:
        live = self.live
        self.live = [name for name in live if self.groups[name] == self.groups[target]]
        try:
            return super().other(target)
        finally:
            self.live = live

    def start(self) -> None:
        shape = self.pick(SHAPES)
        numel = torch.Size(shape).numel()
        name = f"t{self.made}"
        text = f"(torch.arange({numel}) % 7 - 3).to(torch.{self.pick(DTYPES)}).reshape({shape})"
        self.define(f"{text}.to(device)")
        if self.pick([True, True, False]):
            self.shard(name, self.cpu[name])

    def shard(self, name: str, tensor: torch.Tensor) -> None:
        if is_whole(tensor) and tensor.numel():
            spec = random_spec(self.pick, self.meshes[self.group], tensor)
            if self.line(f"shard({name}, {self.group}, {spec})"):
                asked = self.meshes[self.group], spec
                self.ask(tensor, asked)

    def ask(self, tensor: torch.Tensor, asked: Any) -> None:
        self.kept.append(tensor.untyped_storage())
        self.asked[storage_of(tensor)] = geometry_of(tensor), asked

    def constrain(self, name: str, tensor: torch.Tensor) -> None:
        spec = random_spec(self.pick, self.meshes[self.group], tensor, "?")
        self.define(f"constrain({name}, {self.group}, {spec})")

    def like(self, name: str, tensor: torch.Tensor) -> None:
        self.define(f"torch.{self.pick(['zeros', 'ones'])}_like({name})")

    def look(self, name: str, tensor: torch.Tensor) -> None:
        self.lines.append(f"sharding({name})")
        lazyxla.sharding(self.device[name])

    # --- Steps that give a tensor other memory ---------------------------------------------------

    def in_group(self, name: str, dtype: torch.dtype) -> list[str]:
        """Tensors of this dtype that may take each other's memory."""
        same = [n for n in self.live if self.groups[n] == self.groups[name]]
        return [n for n in same if self.cpu[n].dtype == dtype]

    def take_memory(self, name: str, tensor: torch.Tensor) -> None:
        other = self.pick(self.in_group(name, tensor.dtype))
        self.line(self.pick([f"{name}.data = {other}", f"{name}.set_({other})"]))

    def swap(self, name: str, tensor: torch.Tensor) -> None:
        # PyTorch refuses what is a view's base, which may differ between the worlds.
        alone = [
            n for n in self.live if self.cpu[n]._use_count() == self.device[n]._use_count() == 1
        ]
        others = [other for other in alone if other != name]
        if name in alone and others:
            other = self.pick(others)
            if self.line(f"torch.utils.swap_tensors({name}, {other})"):
                groups = self.groups
                groups[name], groups[other] = groups[other], groups[name]

    def convert(self, name: str, tensor: torch.Tensor) -> None:
        """A copy of all its memory is spread alike."""
        made = f"t{self.made}"
        to = self.pick([torch.float32, torch.float64, torch.complex64])
        asked = self.asked.get(storage_of(tensor))
        is_asked = asked is not None and asked[0] == geometry_of(tensor)
        self.define(f"{name}.to({to})")
        if is_asked and made in self.live and is_whole(self.cpu[made]):
            self.ask(self.cpu[made], asked[1])  # type: ignore[index]

    def resize(self, name: str, tensor: torch.Tensor) -> None:
        """Memory of another size is no longer spread."""
        before = tensor.untyped_storage().nbytes()
        self.line(
            f"{name}.untyped_storage().resize_({before + self.pick([4, 16, 64])})"
            if self.pick([True, False])
            else f"{name}.resize_({self.pick(SHAPES)}).fill_({self.number(tensor)})"
        )
        if tensor.untyped_storage().nbytes() != before:
            self.asked.pop(storage_of(tensor), None)

    def check_shardings(self) -> None:
        for name in self.live:
            tensor = self.cpu[name]
            asked = self.asked.get(storage_of(tensor))
            if asked is None or asked[0] != geometry_of(tensor):
                continue
            mesh, spec = asked[1]
            check_sharding(self.device[name], mesh, spec, name)


def check_sharding(x: torch.Tensor, mesh: lazyxla.Mesh, spec: tuple[Any, ...], name: str) -> None:
    found = lazyxla.sharding(x)
    assert found is not None, f"{name} is not spread"
    whole = (*spec, *[None] * (x.dim() - len(spec)))
    assert _normal(found) == _normal(lazyxla.Sharding(mesh, whole)), f"{name}: {found}"


def _normal(sharding: lazyxla.Sharding) -> Any:
    mesh, spec = sharding
    sizes = dict(zip(mesh.axis_names, mesh.shape))
    names = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return mesh.devices, [tuple(n for n in each if sizes.get(n) != 1) for each in names]


SHARDED_STEPS = [
    *STEPS,
    *[ShardedProgram.shard] * 3,
    ShardedProgram.constrain,
    ShardedProgram.like,
    ShardedProgram.look,
    ShardedProgram.take_memory,
    ShardedProgram.swap,
    ShardedProgram.convert,
    ShardedProgram.resize,
]
