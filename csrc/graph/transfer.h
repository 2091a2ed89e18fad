// Transfers: copies of data between the host and the devices, or between two devices.
//
// While data is abstract, as it is during a capture (record/capture.h), nothing reaches a device:
// uploads and copies are leaves that have a type and no data.
#pragma once

#include <c10/util/FunctionRef.h>

#include <c10/core/Device.h>

#include "program/buffer.h"

namespace lazyxla::graph {

void set_data_abstract(bool is_abstract);
bool data_is_abstract();

// Copies host data (dense, row-major, of the given type) to the device.
ir::Value upload(const void* data, const ir::TensorType& type, c10::DeviceIndex device);

// The same, each device of the sharding's mesh getting its part.
ir::Value upload(const void* data, const ir::TensorType& type, const ir::Sharding& sharding);

// A block of an array: where it begins in the whole, its size, and its elements on the host.
struct Block {
  ir::Dims begin, size;
  const char* data;
};

// The same, for data that is not available as a whole: `block_at` returns the block that contains
// the device's part that begins at `begin`. It is called for this process's devices only.
ir::Value upload_blocks(const ir::TensorType& type, const ir::Sharding& sharding,
                        c10::function_ref<Block(const ir::Dims& begin)> block_at);

// Calls `take` for each part of a sharded leaf that this process's devices hold, once.
void download_blocks(const ir::Value& leaf, c10::function_ref<void(const Block&)> take);

// Copies the leaf's data to another device.
ir::Value copy_to_device(const ir::Value& leaf, c10::DeviceIndex device);

// Waits for the leaf's data and copies it (dense, row-major) to `destination`.
void download(const ir::Value& leaf, void* destination);

}  // namespace lazyxla::graph
