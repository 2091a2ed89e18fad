"""Checkpoints of sharded tensors by parts: planners for ``torch.distributed.checkpoint``.

PyTorch's own planners save and load a tensor of the device whole. With the planners here each
process writes and reads what its devices hold; nothing is gathered. The files are the same: a
checkpoint can be loaded with any sharding, into a DTensor, or whole.

    import torch.distributed.checkpoint as dcp
    from lazyxla.checkpoint import LoadPlanner, SavePlanner

    dcp.save(model.state_dict(), checkpoint_id="step-100", planner=SavePlanner())
    dcp.load(model.state_dict(), checkpoint_id="step-100", planner=LoadPlanner())
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from lazyxla import _C
from lazyxla.runtime import BACKEND


class _Blocks:
    """The parts of a sharded tensor that this process's devices hold, as the planners ask for them.

    They are read from the devices when the first one is asked for.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._sharding = _C.sharding_of(tensor)
        shard = self._sharding.shard_shape(list(tensor.shape))
        self._sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        for position in _C.own_positions(self._sharding.mesh):
            begin = [tile * size for tile, size in zip(self._sharding.tile_of(position), shard)]
            sizes = [min(size, n - b) for size, n, b in zip(shard, tensor.shape, begin)]
            if min(sizes, default=1) > 0:
                self._sizes[tuple(begin)] = tuple(sizes)
        self._hosts: dict[tuple[int, ...], torch.Tensor] = {}

    def size(self) -> torch.Size:
        return self.tensor.size()

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.tensor.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(begin), torch.Size(sizes))
            for begin, sizes in self._sizes.items()
        ]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        """The part that begins at the index's offset, on the CPU."""
        if not self._hosts:
            self._hosts = {tuple(begin): host for begin, host in _C.local_blocks(self.tensor)}
        assert index.offset is not None
        return self._hosts[tuple(index.offset)]

    def make_room(self) -> None:
        """For parts to be loaded, which replace what the tensor has."""
        dtype = self.tensor.dtype
        self._hosts = {b: torch.empty(s, dtype=dtype) for b, s in self._sizes.items()}

    def upload(self) -> None:
        with torch.no_grad():
            _C.set_local_blocks(self.tensor, self._sharding, list(self._hosts.items()))
        self._hosts = {}


def _by_blocks(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The flat state dict with sharded tensors by their parts."""
    return {
        name: _Blocks(value) if _is_sharded(value) else value for name, value in state_dict.items()
    }


def _is_sharded(value: Any) -> bool:
    is_ours = isinstance(value, torch.Tensor) and value.device.type == BACKEND
    # One without elements has no parts, by which it would be written.
    return is_ours and value.numel() > 0 and _C.sharding_of(value) is not None


class SavePlanner(DefaultSavePlanner):
    """PyTorch's ``DefaultSavePlanner``, which writes the parts of sharded tensors.

    Where several processes hold the same part, one of them writes it.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As PyTorch's."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _by_blocks(self.state_dict)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """As PyTorch's."""
        value = self.state_dict[index.fqn]
        return value.part(index) if isinstance(value, _Blocks) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """PyTorch's ``DefaultLoadPlanner``, which reads the parts of sharded tensors, and assigns a
    tensor's content once all its parts are read."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """As PyTorch's."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _by_blocks(self.state_dict)
        for value in self.state_dict.values():
            if isinstance(value, _Blocks):
                value.make_room()

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """As PyTorch's."""
        plan = super().finish_plan(new_plan)
        self._left = Counter(item.dest_index.fqn for item in plan.items)
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """As PyTorch's."""
        value = self.state_dict[index.fqn]
        return value.part(index) if isinstance(value, _Blocks) else super().lookup_tensor(index)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """As PyTorch's."""
        super().commit_tensor(read_item, tensor)
        name = read_item.dest_index.fqn
        self._left[name] -= 1
        value = self.state_dict[name]
        if self._left[name] == 0 and isinstance(value, _Blocks):
            value.upload()
