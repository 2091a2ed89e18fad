// Shards on their way between the host and the devices: each device gets its part of an array, and
// the parts are put together again.
#pragma once

#include "program/buffer.h"

namespace lazyxla::graph {

// Copies host data (dense, row-major, of the given type) to the devices of the sharding's mesh.
// Throws pjrt::Error.
Shards upload_shards(const void* data, const ir::TensorType& type, const ir::Sharding& sharding);

// Waits for the data and copies it (dense, row-major) to `destination`. Throws pjrt::Error.
void download_shards(const Shards& shards, const ir::TensorType& type, void* destination);

}  // namespace lazyxla::graph
