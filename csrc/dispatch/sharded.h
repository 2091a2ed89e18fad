// Tensors that are spread over many devices (ir/sharding.h).
//
// What is declared is the storage's: all tensors that share it are spread, whatever is written to
// them stays so, and the base geometry stays what it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "ir/sharding.h"

namespace lazyxla::dispatch {

// Spreads the tensor's memory from now on. Data that is there is moved, what is recorded comes out
// so. The tensor must be all of its memory.
void shard(const at::Tensor& tensor, const ir::Sharding& sharding);

// A tensor that is sharded so, of which this process has its devices' part: `local`, on the CPU.
// That must be one block, whose size divides evenly among them.
at::Tensor shard_local(const at::Tensor& local, const ir::Sharding& sharding);

// The parts of a sharded tensor that this process's devices hold, each once: where they begin, and
// the elements, on the CPU.
using Blocks = std::vector<std::pair<std::vector<int64_t>, at::Tensor>>;
Blocks local_blocks(const at::Tensor& tensor);  // flushes
// Gives a tensor such parts as its content.
void set_local_blocks(const at::Tensor& tensor, const ir::Sharding& sharding, const Blocks& blocks);

// How the tensor's elements are spread; null if they are not. Flushes if nobody can tell yet.
const ir::Sharding* sharding_of(const at::Tensor& tensor);

// What is declared for a tensor that is its storage's content as it stands; null for all others.
const ir::Sharding* declared_sharding(const at::Tensor& tensor);

// The same, or else how its data is spread, if it is there. Flushes nothing.
const ir::Sharding* known_sharding(const at::Tensor& tensor);

}  // namespace lazyxla::dispatch
