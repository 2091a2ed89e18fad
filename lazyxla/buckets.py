"""Batches of few sizes: a program is compiled per shape, so batches are padded to some of them.

    batch                       dims=(0, 1), sizes={0: [4], 1: [4, 8]}

    input_ids [3, 6] long       input_ids [4, 8]    mask [4, 8]     T T T T T T F F
    labels    [3]    long       labels    [4]                       T T T T T T F F
                                                                    T T T T T T F F
                                                                    F F F F F F F F

Three passes over the batch: which tensors are padded in which dimensions, then from their sizes the
bucket of each dimension, then the padding itself. A tensor that needs none is not copied.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy, deepcopy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import GetAttrKey, KeyEntry, MappingKey, tree_map_with_path

Dims = int | Iterable[int] | Mapping[Any, "Dims"]
Sizes = Iterable[int] | Mapping[int, Iterable[int]]
Value = complex | Mapping[Any, "Value"]


def bucket(batch: Any, *, dims: Dims, sizes: Sizes, value: Value = 0) -> tuple[Any, torch.Tensor]:
    """Pads the tensors of a batch at their ends, so that few different shapes are left.

        batch, mask = lazyxla.bucket(batch, dims=(0, 1), sizes={0: [32], 1: [64, 128, 256]})

    Each of ``dims`` grows to the smallest of its ``sizes`` that is large enough. Pad on the host,
    before the upload: on the device the padding itself is compiled for each size.

    Args:
        batch: a tensor, or tensors in tuples, lists, dicts, named tuples and other containers of
            PyTorch's pytree, in other mutable mappings and in dataclasses, nested as you like. The
            tensors may be of any dtype, on any device. Other objects, PackedSequences among them,
            and 0-dim tensors are handed on.
        dims: one dimension or several, for all tensors; each is padded in those that it has.
            Negative ones count from the end of each tensor. Or a mapping with the batch's keys
            (positions for tuples and lists, fields for named tuples and dataclasses) to the
            dimensions of each entry: ``{"tokens": (0, 1), "labels": 0}``. Entries without a key
            are then not padded. Mappings nest as the batch does; what is said of a container holds
            for all within.
        sizes: the buckets, positive and in any order, of all dimensions; or a mapping from each
            dimension, as ``dims`` has it, to its own.
        value: the number to fill with, or a mapping from the batch's keys, like that of ``dims``,
            to each entry's: ``{"labels": -100}``. Entries without a key get 0 or False.

    Returns:
        The padded batch and its mask. Containers are new; gradients flow through the padding. A
        tensor that has the right size already is returned as it is, with its strides. The mask is
        a bool tensor, True where there was data. It has the leading dimensions of a tensor of the
        batch, up to its last padded one: for tokens ``[B, T]`` or ``[B, T, C]`` it is
        ``[B', T']`` with ``dims=(0, 1)`` as with ``dims=1``, and ``[B']`` with ``dims=0``. It
        belongs to the first tensor that has most of the ``dims``, and is on that one's device.

    Raises:
        ValueError: tensors of the batch differ in the size of one of the ``dims``, or a size is
            greater than the greatest bucket; no tensor has one of the ``dims``, or one has it
            twice, as 1 and -1; ``dims`` or ``value`` has a key that no tensor has; a value does not
            fit a tensor's dtype; ``sizes`` has none, one less than 1, or other dimensions than
            ``dims``.
        TypeError: dims or sizes that are no integers, a value that is no number.
    """
    return Buckets(dims=dims, sizes=sizes, value=value)(batch)


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """How batches are padded: the arguments of :func:`bucket`, checked once, for many batches.

        buckets = lazyxla.Buckets(dims=1, sizes=[64, 128, 256])
        batch, mask = buckets(batch)
        for batch, mask in lazyxla.DeviceLoader(loader, buckets=buckets): ...

    Args:
        dims, sizes, value: see :func:`bucket`.

    Raises:
        ValueError, TypeError: see :func:`bucket`; those that concern no batch when it is made.
    """

    dims: Dims
    sizes: Sizes
    value: Value = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", _checked(self.dims, _checked_dims))
        if not any(_named(self.dims)):
            raise ValueError("dims must have at least one dimension, got an empty mapping")
        object.__setattr__(self, "sizes", self._checked_sizes())
        object.__setattr__(self, "value", _checked(self.value, _checked_value))

    def __call__(self, batch: Any) -> tuple[Any, torch.Tensor]:
        """Pads a batch of tensors, see :func:`bucket`. Returns it and its mask."""
        entries = self._entries(batch)
        targets = self._targets(list(entries.values()))

        def pad(keys: tuple[KeyEntry, ...], tensor: torch.Tensor) -> torch.Tensor:
            entry = entries[keys]
            return _pad(tensor, entry.positions, targets, entry.value)

        padded = _map(pad, batch)
        largest = max(entries.values(), key=lambda entry: len(entry.positions))
        shape = largest.tensor.shape[: max(largest.positions.values()) + 1]
        data = torch.ones(shape, dtype=torch.bool, device=largest.tensor.device)
        return padded, _pad(data, largest.positions, targets, False)

    def _checked_sizes(self) -> Sizes:
        if not isinstance(self.sizes, Mapping):
            return _sorted_sizes(self.sizes)
        dims = {dim for _, named in _named(self.dims) for dim in named}
        if dims != set(self.sizes):
            raise ValueError(
                f"sizes must have buckets for each of the dims, {sorted(dims)}, and no others; "
                f"got {list(self.sizes)}"
            )
        return {dim: _sorted_sizes(sizes) for dim, sizes in self.sizes.items()}

    def _entries(self, batch: Any) -> dict[tuple[KeyEntry, ...], _Entry]:
        """The tensors of a batch, by their paths in it."""
        entries: dict[tuple[KeyEntry, ...], _Entry] = {}

        def enter(keys: tuple[KeyEntry, ...], tensor: torch.Tensor) -> torch.Tensor:
            dims, value = _of(self.dims, keys, ()), _of(self.value, keys, 0)
            name = _name(keys)
            entries[keys] = _Entry(name, tensor, _positions(dims, tensor, name), value)
            if entries[keys].positions and not _fits(value, tensor.dtype):
                raise ValueError(f"value {value} of {name} does not fit {tensor.dtype}")
            return tensor

        _map(enter, batch)
        _check_keys("dims", self.dims, entries)
        _check_keys("value", self.value, entries)
        return entries

    def _targets(self, entries: list[_Entry]) -> dict[int, int]:
        """The size that each dimension gets."""
        targets = {}
        for dim in dict.fromkeys(dim for _, named in _named(self.dims) for dim in named):
            names: dict[int, list[str]] = {}
            for entry in entries:
                if dim in entry.positions:
                    names.setdefault(entry.tensor.shape[entry.positions[dim]], []).append(
                        entry.name
                    )
            if not names:
                shapes = ", ".join(f"{e.name} of shape {list(e.tensor.shape)}" for e in entries)
                raise ValueError(
                    f"no tensor to be padded has dimension {dim}; "
                    f"the batch has {shapes or 'no tensors'}"
                )
            if len(names) > 1:
                differing = ", ".join(f"{size} of {' and '.join(at)}" for size, at in names.items())
                raise ValueError(
                    f"tensors of a batch differ in the size of dimension {dim}: {differing}. If "
                    "they may, leave some out by a mapping as `dims`, or pad in several calls"
                )
            (size,) = names
            sizes = self.sizes[dim] if isinstance(self.sizes, Mapping) else self.sizes
            fitting = [each for each in sizes if each >= size]
            if not fitting:
                raise ValueError(
                    f"dimension {dim} of {names[size][0]} has size {size}, more than the greatest "
                    f"bucket of {list(sizes)}"
                )
            targets[dim] = fitting[0]
        return targets


@dataclass(frozen=True)
class _Entry:
    """A tensor of a batch: where it pads which of the dims, and with what."""

    name: str
    tensor: torch.Tensor
    positions: dict[int, int]
    value: complex


# --- What the arguments say ----------------------------------------------------------------------


def _checked(argument: Any, check: Callable[[Any], Any]) -> Any:
    """An argument, or the mapping of those of the entries, with each of them checked."""
    if isinstance(argument, Mapping):
        return {key: _checked(each, check) for key, each in argument.items()}
    return check(argument)


def _checked_dims(dims: Any) -> tuple[int, ...]:
    result = tuple(_index("dims", dim) for dim in _iterable("dims", dims))
    if not result or len(set(result)) < len(result):
        raise ValueError(f"dims must be different dimensions, at least one, got {dims}")
    return result


def _sorted_sizes(sizes: Any) -> tuple[int, ...]:
    result = tuple(sorted(_index("sizes", size) for size in _iterable("sizes", sizes)))
    if not result or result[0] < 1:
        raise ValueError(f"sizes must be positive, at least one, got {list(result)}")
    return result


def _checked_value(value: Any) -> complex:
    if hasattr(value, "__index__") and not isinstance(value, bool):
        return operator.index(value)  # NumPy's integers, too
    if isinstance(value, (bool, complex)):
        return value
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, numbers.Complex):
        return complex(value)
    raise TypeError(f"value must be a number, got {type(value).__name__}")


def _iterable(name: str, values: Any) -> Iterable[Any]:
    if name == "dims" and not isinstance(values, (str, Iterable)):
        return (values,)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of integers, got {type(values).__name__}")
    return values


def _index(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be integers, got {type(value).__name__}")
    return operator.index(value)


def _named(argument: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values of an argument, with the keys of the entries that they apply to."""
    if not isinstance(argument, Mapping):
        yield keys, argument
        return
    for key, each in argument.items():
        yield from _named(each, (*keys, key))


def _of(argument: Any, keys: tuple[KeyEntry, ...], default: Any) -> Any:
    """The part of an argument that applies to an entry."""
    for key in keys:
        if isinstance(argument, Mapping):
            argument = argument.get(_plain(key), default)
    return default if isinstance(argument, Mapping) else argument


def _check_keys(name: str, argument: Any, entries: Mapping[tuple[KeyEntry, ...], _Entry]) -> None:
    """Says which keys are of no entry: most likely they are misspelt."""
    if not isinstance(argument, Mapping):
        return
    present = [tuple(map(_plain, keys)) for keys in entries]
    for keys, _ in _named(argument):
        if not any(keys == each[: len(keys)] for each in present):
            key = "".join(f"[{key!r}]" for key in keys)
            names = ", ".join(entry.name for entry in entries.values()) or "no tensors"
            raise ValueError(f"{name} has a key {key} that no tensor has; the batch has {names}")


def _plain(key: Any) -> Any:
    """A pytree's key as it is written in a mapping."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    raise TypeError(f"a batch with keys of {type(key).__name__}")


def _name(keys: tuple[KeyEntry, ...]) -> str:
    return "batch" + "".join(map(str, keys))


def _positions(dims: Iterable[int], tensor: torch.Tensor, name: str) -> dict[int, int]:
    """Where a tensor has the dims."""
    rank = tensor.dim()
    result = {dim: dim % rank for dim in dims if -rank <= dim < rank}
    if len(set(result.values())) < len(result):
        raise ValueError(f"{name} of shape {list(tensor.shape)} has one of the dims twice: {dims}")
    return result


def _fits(value: complex, dtype: torch.dtype) -> bool:
    """Whether elements of a dtype can have a value; those of floating point may round it."""
    if dtype.is_complex:
        return _fits(value.real, dtype.to_real()) and _fits(value.imag, dtype.to_real())
    if isinstance(value, complex):
        return False
    is_finite = isinstance(value, int) or math.isfinite(value)  # there are integers beyond floats
    if dtype.is_floating_point:
        return not is_finite or abs(value) <= torch.finfo(dtype).max
    if not is_finite or value != int(value):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    return torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


# --- The batch -----------------------------------------------------------------------------------


def _pad(
    tensor: torch.Tensor, positions: Mapping[int, int], targets: Mapping[int, int], value: complex
) -> torch.Tensor:
    # constant_pad_nd has two numbers per dimension, before and after it, from the last on.
    added = [0] * (2 * tensor.dim())
    for dim, position in positions.items():
        added[-2 * position - 1] = targets[dim] - tensor.shape[position]
    if not any(added):
        return tensor
    # functional.pad would make large integers floats first.
    return torch.constant_pad_nd(tensor, added, value)


def _map(
    function: Callable[[tuple[KeyEntry, ...], torch.Tensor], torch.Tensor],
    batch: Any,
    outer: tuple[KeyEntry, ...] = (),
) -> Any:
    """The batch with its tensors replaced; the function gets their keys, too."""

    def replaced(inner: tuple[KeyEntry, ...], leaf: Any) -> Any:
        keys = outer + inner
        if isinstance(leaf, torch.Tensor):
            return function(keys, leaf)
        if isinstance(leaf, type):
            return leaf
        result = leaf
        if is_dataclass(leaf):
            result = copy(leaf)
            for name in (field.name for field in fields(leaf) if hasattr(leaf, field.name)):
                each = _map(function, getattr(leaf, name), (*keys, GetAttrKey(name)))
                object.__setattr__(result, name, each)  # frozen ones, too
        elif isinstance(leaf, MutableMapping):  # such as transformers' BatchEncoding
            before = dict(leaf)
            after = {k: _map(function, v, (*keys, MappingKey(k))) for k, v in before.items()}
            result = copy(leaf)
            result.update(after)
            if any(leaf[key] is not each for key, each in before.items()):
                # A copy of this class shares its entries with the original.
                leaf.update(before)
                result = deepcopy(leaf, {id(before[key]): each for key, each in after.items()})
        return result

    # A PackedSequence is a named tuple, but its tensors must not be padded.
    return tree_map_with_path(replaced, batch, is_leaf=lambda x: isinstance(x, PackedSequence))
