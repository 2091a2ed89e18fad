"""Many devices as one: tensors that are spread over the devices of a mesh.

A tensor remains one tensor of its full shape; what is sharded is its memory. Everything computes
with it as before. The compiler partitions each program over the devices, and adds the
communication::

    mesh = lazyxla.Mesh((4, 2), ("data", "model"))
    lazyxla.shard(weight, mesh, (None, "model"))   # columns over "model", the same along "data"
    lazyxla.shard(batch, mesh, ("data",))          # rows over "data"
    y = batch @ weight                             # runs on all eight devices

A *spec* has an entry for each dimension: None (not split), the name of an axis, or a tuple of
names, of which the first one is the outermost. A shorter spec leaves the other dimensions whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd import forward_ad

from lazyxla import _C, untraced
from lazyxla.mesh import Entry, Mesh, Spec, check_mesh, sharding_of_spec
from lazyxla.runtime import BACKEND

SpecOf = Spec | Callable[[str, torch.Tensor], Spec]
T = TypeVar("T", torch.Tensor, torch.nn.Module)


class Sharding(NamedTuple):
    """How a tensor is split over the devices of a mesh.

    A sharding that the partitioner chose may use a part of an axis: ``"data:(2)4"`` is the part of
    ``data`` that is 4 long and has 2 such parts outside.
    """

    mesh: Mesh
    """The devices."""
    spec: tuple[Entry, ...]
    """For each dimension None, an axis, or a tuple of axes."""


def shard(target: T, mesh: Mesh, spec: SpecOf) -> T:
    """Shards a tensor, or all of a module's parameters and buffers, over the devices of a mesh.

    This happens in place: the tensor keeps its shape and identity, and it remains sharded when it
    is written to. Its views are sharded with it. A tensor on the CPU moves to the devices, each of
    which gets its part; data on a device are moved; a value that is only recorded is sharded when
    it is computed. The gradient of a leaf gets the same sharding, and so does what ``zeros_like``
    and similar functions make, such as the optimizer's state.

    A dimension need not divide evenly; the last shards are then padded in memory.

    Args:
        target: the tensor or module.
        mesh: the devices.
        spec: for each dimension None (not split), an axis, or a tuple of axes; missing entries are
            None. For a module also a function that returns the spec for a name and a parameter.

    Returns:
        The target.

    Raises:
        ValueError: the spec has more entries than the tensor has dimensions, an axis that the mesh
            does not have, or an axis twice; or the tensor is a view of a part of its memory, or has
            a gradient function on the CPU. Nothing has been changed then.
        TypeError: the target is neither a tensor nor a module, or the spec no tuple.
    """
    if isinstance(target, torch.nn.Module):
        named = [*target.named_parameters(), *target.named_buffers()]
    elif isinstance(target, torch.Tensor):
        named = [("", target)]
    else:
        raise TypeError(f"expected a tensor or a module, got {type(target).__name__}")
    specs = [spec(name, tensor) if callable(spec) else spec for name, tensor in named]
    shard_all([tensor for _, tensor in named], mesh, specs)
    return target


def shard_all(tensors: Sequence[torch.Tensor], mesh: Mesh, specs: Iterable[Spec]) -> None:
    """Shards each tensor by its spec. What is wrong with any is raised before one is changed."""
    check_mesh(mesh)
    raws = [sharding_of_spec(mesh, spec, t.dim()) for t, spec in zip(tensors, specs, strict=True)]
    for tensor in tensors:
        if tensor.device.type != "cpu":
            _C.check_shardable(tensor)
        elif not tensor.is_leaf:
            raise ValueError(
                "a tensor on the CPU that has a gradient function cannot be sharded, for it would "
                'change devices; move it with .to("lazyxla") before'
            )
    for tensor, raw in zip(tensors, raws, strict=True):
        _shard(tensor, raw)


def replicate(target: T, mesh: Mesh) -> T:
    """Puts a whole copy of a tensor, or of a module's parameters and buffers, on every device of a
    mesh. It works in place, as :func:`shard` with nothing split.

    Args:
        target: the tensor or module.
        mesh: the devices.
    """
    return shard(target, mesh, ())


def shard_local(local: torch.Tensor, mesh: Mesh, spec: Spec) -> torch.Tensor:
    """A sharded tensor of which each process gives its own devices' part.

    It is for data that processes load each for itself, such as batches, when they share their
    devices (``torch.distributed`` on TPUs and GPUs). All processes of the mesh call it, with parts
    of the same shape: the whole is as many times larger along a dimension as that is split between
    processes. In one process the part is the whole.

    Args:
        local: on the CPU, of any dtype: one block of the whole, which divides evenly among this
            process's devices.
        mesh: the devices.
        spec: for each dimension None (not split), an axis, or a tuple of axes; missing entries are
            None.

    Returns:
        The whole, on the devices.

    Raises:
        ValueError: as :func:`shard`; the part is not on the CPU, or does not divide evenly; or this
            process's devices hold no single block of the whole.
    """
    _check_tensor(local)
    raw = sharding_of_spec(mesh, spec, local.dim())
    whole: torch.Tensor = _C.shard_local(local.detach(), raw)
    return whole


@untraced.traced
def constrain(x: torch.Tensor, mesh: Mesh, spec: Spec) -> torch.Tensor:
    """Returns ``x`` and fixes its sharding, and that of its gradient, within the program.

    It is for intermediate values whose sharding the partitioner would choose otherwise. The entry
    ``"?"`` leaves a dimension to the partitioner.

    Args:
        x: a tensor on the device, of any shape and dtype.
        mesh: the devices.
        spec: for each dimension None (whole), an axis, a tuple of axes, or ``"?"``; missing entries
            are None.

    Raises:
        ValueError: as :func:`shard`; or ``x`` is on another kind of device.
    """
    _check_tensor(x)
    if x.device.type != BACKEND:
        raise ValueError(f"a tensor on {x.device} cannot be sharded")
    check_mesh(mesh)
    return _constrained(x, mesh._sharding_text(spec, x.dim()))


def sharding(x: torch.Tensor) -> Sharding | None:
    """The sharding of a tensor; None if it is on one device.

    A value that is only recorded, and has no chosen sharding, is computed first.

    Args:
        x: a tensor, of any shape and dtype.
    """
    _check_tensor(x)
    raw = _C.sharding_of(x) if x.device.type == BACKEND else None
    if raw is None:
        return None
    return Sharding(_mesh_of(raw.mesh), spec_of(raw))


def visualize(x: torch.Tensor) -> str:
    """A picture of which device holds which part of a tensor: a table for one and two dimensions,
    a line for each part otherwise.

    Args:
        x: a tensor, of any shape and dtype.
    """
    _check_tensor(x)
    raw = _C.sharding_of(x) if x.device.type == BACKEND else None
    if raw is None:
        return f"{tuple(x.shape)} on {x.device}"
    holders: dict[tuple[int, ...], list[str]] = {}
    for position, device in enumerate(raw.mesh.devices):
        holders.setdefault(tuple(raw.tile_of(position)), []).append(str(device))
    cells = {tile: ",".join(devices) for tile, devices in holders.items()}
    title = f"{tuple(x.shape)}: {raw.text}"
    if x.dim() not in (1, 2):
        shape = raw.shard_shape(list(x.shape))
        return "\n".join([title, *(f"{_region(t, shape, x.shape)}: {c}" for t, c in cells.items())])
    rows = max(tile[0] for tile in cells) + 1 if x.dim() == 2 else 1
    columns = max(tile[-1] for tile in cells) + 1
    width = max(len(cell) for cell in cells.values())
    rule = "+" + "+".join(["-" * (width + 2)] * columns) + "+"
    lines = [title, rule]
    for i in range(rows):
        row = [cells[(i, j) if x.dim() == 2 else (j,)] for j in range(columns)]
        lines += ["|" + "|".join(f" {cell:^{width}} " for cell in row) + "|", rule]
    return "\n".join(lines)


@untraced.traced
def _check_tensor(x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"expected a tensor, got {type(x).__name__}")


def _region(tile: tuple[int, ...], shard_shape: Sequence[int], shape: Sequence[int]) -> str:
    parts = zip(tile, shard_shape, shape)
    ranges = [f"{min(t * s, n)}:{min((t + 1) * s, n)}" for t, s, n in parts]
    return "[" + ", ".join(ranges) + "]"


def _shard(tensor: torch.Tensor, raw: Any) -> None:
    with torch.no_grad():
        if tensor.device.type == "cpu":
            fresh = torch.empty_like(tensor, device=BACKEND)
            _C.shard(fresh, raw)
            grad, tensor.grad = tensor.grad, None
            tensor.data = fresh.copy_(tensor)
            tensor.grad = None if grad is None else grad.to(fresh.device)
        else:
            _C.shard(tensor, raw)
        if tensor.is_leaf and tensor.grad is not None:
            _C.try_shard(tensor.grad, raw)
    if tensor.requires_grad and tensor.is_leaf:
        spread_gradient(tensor)


def spread_gradient(leaf: torch.Tensor) -> None:
    """Spreads a sharded leaf's gradient from now on as the leaf is."""
    if _spread_gradient not in (leaf._backward_hooks or {}).values():
        leaf.register_hook(_spread_gradient)
    # torch.utils.swap_tensors leaves the dict with the other one's hooks in the engine.
    leaf._backward_hooks = leaf._backward_hooks


@torch.utils.hooks.unserializable_hook
def _spread_gradient(grad: torch.Tensor) -> torch.Tensor | None:
    """A hook of leaves: the gradient is spread as the leaf is.

    It refers to no tensor: torch.utils.swap_tensors, which may exchange the leaf for another one,
    refuses tensors that are weakly referred to.
    """
    leaf = getattr(torch._C._current_autograd_node(), "variable", None)
    raw = None if leaf is None else _C.known_sharding(leaf)
    if raw is None or grad.layout != torch.strided:
        return None
    spread = _constrained(grad, raw.text)
    _C.try_shard(spread, raw)  # also if it is written to before it is computed
    return spread


_C.set_spreading_hook(_spread_gradient)


def spec_of(raw: Any) -> tuple[Entry, ...]:
    """The spec of an interned sharding."""
    return tuple(_entry(raw, parts) for parts in raw.spec)


def stacked(raw: Any, may_be_split: bool = False) -> Any:
    """The interned sharding of tensors of this one that are stacked along a new first dimension,
    which is whole, or the partitioner's to split."""
    names = [name for name, _ in raw.mesh.axes]
    axes = [[names.index(name) for name, _, _ in parts] for parts in raw.spec]
    return _C.make_sharding(raw.mesh, [[], *axes], [may_be_split, *raw.open])


def _mesh_of(raw: Any) -> Mesh:
    names, shape = zip(*raw.axes)
    return Mesh(shape, names, raw.devices)


def _entry(raw: Any, parts: Sequence[tuple[str, int, int]]) -> Entry:
    sizes = dict(raw.mesh.axes)
    names = [n if size == sizes[n] else f"{n}:({before}){size}" for n, before, size in parts]
    return None if not names else names[0] if len(names) == 1 else tuple(names)


class _Constrain(torch.autograd.Function):
    """The operator as a linear function, whose derivatives are constrained alike."""

    @staticmethod
    def forward(x: torch.Tensor, sharding: str) -> torch.Tensor:
        return torch.ops.lazyxla.constrain(x, sharding)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.sharding = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _constrained(grad, ctx.sharding), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        return _constrained(tangent, ctx.sharding)

    @staticmethod
    def vmap(
        _info: Any, in_dims: tuple[int, None], x: torch.Tensor, sharding: str
    ) -> tuple[torch.Tensor, int]:
        text = stacked(_C.find_sharding(sharding), may_be_split=True).text
        return _constrained(x.movedim(in_dims[0], 0), text), 0


@untraced.traced
def _constrained(x: torch.Tensor, sharding: str) -> torch.Tensor:
    # The operator's own derivative is what torch.compile traces, and takes a fifth of the time; it
    # serves neither transforms nor forward mode.
    if torch.compiler.is_compiling() or not (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return torch.ops.lazyxla.constrain(x, sharding)  # type: ignore[no-any-return]
    return _Constrain.apply(x, sharding)  # type: ignore[no-any-return]


torch.library.register_autograd(
    "lazyxla::constrain", _Constrain.backward, setup_context=_Constrain.setup_context
)
