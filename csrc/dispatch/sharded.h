// Tensors that are spread over many devices (ir/sharding.h).
//
// A declared sharding belongs to the storage: all tensors that share it are spread, later writes
// keep the sharding, and the base geometry does not change.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ir/sharding.h"

namespace lazyxla::dispatch {

// Spreads the tensor's memory from now on. Existing data is moved; recorded values are computed in
// this sharding. The tensor must be all of its memory.
void shard(const at::Tensor& tensor, const ir::Sharding& sharding);

// Raises a ValueError if the tensor is of another device, or not all of its memory.
void check_shardable(const at::Tensor& tensor);

// The same if it is of the device and all of its memory; otherwise returns false.
bool try_shard(const at::Tensor& tensor, const ir::Sharding& sharding);

// Spreads what was made like a tensor, or as its copy, as that is, if it is and both are whole.
void shard_like(const at::Tensor& made, const at::Tensor& from);

// A tensor with this sharding, of which `local`, on the CPU, is the part of this process's devices.
// It must be one block, whose size divides evenly among them.
at::Tensor shard_local(const at::Tensor& local, const ir::Sharding& sharding);

// The parts of a sharded tensor that this process's devices hold, each once: where they begin, and
// the elements, on the CPU.
using Blocks = std::vector<std::pair<std::vector<int64_t>, at::Tensor>>;
Blocks local_blocks(const at::Tensor& tensor);  // flushes
// Sets a tensor's content to such parts.
void set_local_blocks(const at::Tensor& tensor, const ir::Sharding& sharding, const Blocks& blocks);

// How the tensor's elements are spread; null if they are not. Flushes if it is not known yet.
const ir::Sharding* sharding_of(const at::Tensor& tensor);

// The declared sharding of a tensor that is its storage's whole content, unchanged; null for all
// others.
const ir::Sharding* declared_sharding(const at::Tensor& tensor);

// The same, or else how its data is spread, if it exists. Flushes nothing.
const ir::Sharding* known_sharding(const at::Tensor& tensor);

}  // namespace lazyxla::dispatch
