#include "graph/transfer.h"

#include <c10/util/FunctionRef.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>

#include "common/counters.h"
#include "common/gil.h"
#include "graph/execute.h"
#include "graph/partitioned_run.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"
#include "program/mesh_devices.h"

namespace lazyxla::graph {
namespace {

std::atomic<bool> abstract{false};

// A device's tile: its position in the whole array, without its padding.
struct Region {
  ir::Dims begin, size;

  Region(const ir::TensorType& type, const ir::Sharding& sharding, size_t position) {
    const ir::Dims shard = sharding.shard(type.dims);
    const std::vector<int64_t> tile = sharding.tile_of(position);
    for (size_t i = 0; i < shard.size(); ++i) {
      begin.push_back(std::min(tile[i] * shard[i], type.dims[i]));
      size.push_back(std::min(shard[i], type.dims[i] - begin[i]));
    }
  }

  // As offsets from `origin`.
  void move_to(const ir::Dims& origin) {
    for (size_t i = 0; i < begin.size(); ++i) begin[i] -= origin[i];
  }
  bool is_empty() const {
    return std::any_of(size.begin(), size.end(), [](int64_t n) { return n == 0; });
  }
  // Whether it is one run of elements, and the shard has no padding.
  bool is_run_of(const ir::Dims& whole, const ir::Dims& shard) const {
    size_t first = 0;  // dimension that is longer than 1
    while (first < size.size() && size[first] == 1) ++first;
    for (size_t i = first + 1; i < size.size(); ++i) {
      if (size[i] != whole[i]) return false;
    }
    return size == shard;
  }
};

// (The constructor for a size and a value makes GCC 12 warn of what it takes for uninitialized.)
ir::Dims zeros(size_t rank) {
  ir::Dims dims;
  dims.resize(rank, 0);
  return dims;
}

int64_t offset_in(const ir::Dims& dims, const ir::Dims& index) {
  int64_t offset = 0;
  for (size_t i = 0; i < dims.size(); ++i) offset = offset * dims[i] + index[i];
  return offset;
}

// Calls `row` for each run of elements of the region: its offsets in the whole array and in the
// shard, and its length, in elements.
void for_each_row(const Region& region, const ir::Dims& whole, const ir::Dims& shard,
                  c10::function_ref<void(int64_t, int64_t, int64_t)> row) {
  if (region.is_empty()) return;
  const size_t rank = whole.size();
  if (rank == 0) return row(0, 0, 1);
  ir::Dims at = zeros(rank);
  while (true) {
    ir::Dims in_whole = region.begin;
    for (size_t i = 0; i < rank; ++i) in_whole[i] += at[i];
    row(offset_in(whole, in_whole), offset_in(shard, at), region.size[rank - 1]);
    size_t next = rank - 1;  // the dimension that is counted up
    while (next > 0 && ++at[next - 1] == region.size[next - 1]) at[--next] = 0;
    if (next == 0) return;
  }
}

// Each device of the sharding's mesh that is this process's gets its part.
program::Shards upload_shards(const ir::TensorType& type, const ir::Sharding& sharding,
                              c10::function_ref<Block(const ir::Dims& begin)> block_at) {
  const pjrt::Client& client = pjrt::Runtime::get().client();
  const auto item = static_cast<int64_t>(c10::elementSize(type.dtype));
  const ir::Dims shard = sharding.shard(type.dims);
  const int64_t nbytes = ir::TensorType{type.dtype, shard}.nbytes();
  program::Shards shards{&sharding, {}};
  const program::MeshDevices& own = program::own_devices(sharding.mesh());
  for (size_t i = 0; i < own.positions.size(); ++i) {
    Region region(type, sharding, own.positions[i]);
    const Block block = block_at(region.begin);
    region.move_to(block.begin);
    const char* part = block.data + offset_in(block.size, region.begin) * item;
    std::vector<char> copy;
    if (!region.is_run_of(block.size, shard)) {
      copy.resize(nbytes);
      for_each_row(region, block.size, shard, [&](int64_t whole, int64_t mine, int64_t count) {
        std::memcpy(copy.data() + mine * item, block.data + whole * item, count * item);
      });
      part = copy.data();
    }
    shards.buffers.push_back(client.buffer_from_host(
        part, program::pjrt_type(type.dtype), {shard.begin(), shard.size()}, {}, *own.devices[i]));
  }
  return shards;
}

// Calls `read` for each part of sharded data that this process's devices hold, once. Throws if any
// device's has failed, also if others have the same: all are of one program, which has failed then.
void for_each_part(const program::Shards& shards, const ir::TensorType& type,
                   c10::function_ref<void(const Region&, const pjrt::Buffer&)> read) {
  const ir::Sharding& sharding = *shards.sharding;
  const program::MeshDevices& own = program::own_devices(sharding.mesh());
  std::set<std::vector<int64_t>> met;
  try {
    for (size_t i = 0; i < shards.buffers.size(); ++i) {
      const Region region(type, sharding, own.positions[i]);
      if (met.insert(sharding.tile_of(own.positions[i])).second && !region.is_empty()) {
        read(region, shards.buffers[i]);
      } else {
        shards.buffers[i].await();
      }
    }
  } catch (const pjrt::Error& e) {
    const auto failure = take_failure_of(sharding.mesh());
    rethrow(failure ? *failure : e, "reading a value");
  }
}

// Puts the parts together again.
void download_shards(const program::Shards& shards, const ir::TensorType& type, void* destination) {
  auto* to = static_cast<char*>(destination);
  const auto item = static_cast<int64_t>(c10::elementSize(type.dtype));
  const ir::Dims shard = shards.sharding->shard(type.dims);
  const int64_t nbytes = ir::TensorType{type.dtype, shard}.nbytes();
  TORCH_INTERNAL_ASSERT(program::holds_all(*shards.sharding));
  for_each_part(shards, type, [&](const Region& region, const pjrt::Buffer& part) {
    if (region.is_run_of(type.dims, shard)) {
      return part.to_host(to + offset_in(type.dims, region.begin) * item, nbytes);
    }
    std::vector<char> copy(nbytes);
    part.to_host(copy.data(), nbytes);
    for_each_row(region, type.dims, shard, [&](int64_t whole, int64_t mine, int64_t count) {
      std::memcpy(to + whole * item, copy.data() + mine * item, count * item);
    });
  });
}

}  // namespace

void set_data_abstract(bool is_abstract) { abstract.store(is_abstract, std::memory_order_release); }

bool data_is_abstract() { return abstract.load(std::memory_order_acquire); }

ir::Value upload(const void* data, const ir::TensorType& type, c10::DeviceIndex device) {
  if (data_is_abstract()) return program::make_abstract_leaf(type);
  ++Counters::get().uploads;
  const pjrt::Device& target = pjrt_device(device);
  std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
  try {
    return program::make_leaf(type, pjrt::Runtime::get().client().buffer_from_host(
                                        data, program::pjrt_type(type.dtype), dims, {}, target));
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to the device");
  }
}

ir::Value upload(const void* data, const ir::TensorType& type, const ir::Sharding& sharding) {
  const Block whole{zeros(type.dims.size()), type.dims, static_cast<const char*>(data)};
  return upload_blocks(type, sharding, [&](const ir::Dims&) { return whole; });
}

ir::Value upload_blocks(const ir::TensorType& type, const ir::Sharding& sharding,
                        c10::function_ref<Block(const ir::Dims& begin)> block_at) {
  if (data_is_abstract()) return program::make_abstract_leaf(type, &sharding);
  ++Counters::get().uploads;
  try {
    return program::make_leaf(type, upload_shards(type, sharding, block_at));
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to the devices");
  }
}

void download_blocks(const ir::Value& leaf, c10::function_ref<void(const Block&)> take) {
  ++Counters::get().downloads;
  WithoutGil no_gil;
  const program::Shards& shards = *program::buffer_of(*leaf.node.get()).shards();
  const ir::TensorType& type = leaf.type();
  const auto item = static_cast<int64_t>(c10::elementSize(type.dtype));
  const ir::Dims shard = shards.sharding->shard(type.dims);
  std::vector<char> padded(ir::TensorType{type.dtype, shard}.nbytes()), block(padded.size());
  for_each_part(shards, type, [&](Region region, const pjrt::Buffer& part) {
    part.to_host(padded.data(), padded.size());
    const ir::Dims begin = region.begin;
    region.move_to(begin);
    for_each_row(region, region.size, shard, [&](int64_t whole, int64_t mine, int64_t count) {
      std::memcpy(block.data() + whole * item, padded.data() + mine * item, count * item);
    });
    take({begin, region.size, block.data()});
  });
}

ir::Value copy_to_device(const ir::Value& leaf, c10::DeviceIndex device) {
  if (data_is_abstract()) return program::make_abstract_leaf(leaf.type());
  if (program::buffer_of(*leaf.node.get()).shards()) {
    std::vector<char> host(leaf.type().nbytes());
    download(leaf, host.data());
    return upload(host.data(), leaf.type(), device);
  }
  pjrt::Buffer& buffer = program::buffer_of(*leaf.node.get()).get();
  try {
    return program::make_leaf(leaf.type(), buffer.copy_to_device(pjrt_device(device)));
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to another device", device);
  }
}

void download(const ir::Value& leaf, void* destination) {
  ++Counters::get().downloads;
  WithoutGil no_gil;
  if (const program::Shards* shards = program::buffer_of(*leaf.node.get()).shards()) {
    return download_shards(*shards, leaf.type(), destination);
  }
  pjrt::Buffer& buffer = program::buffer_of(*leaf.node.get()).get();
  try {
    buffer.to_host(destination, leaf.type().nbytes());
  } catch (const pjrt::Error& e) {
    // Its program's failure counts as reported with this, and the storages have what they had
    // before.
    const auto failure =
        pjrt_device(static_cast<c10::DeviceIndex>(buffer.device().index())).take_failure();
    rethrow(failure ? *failure : e, "reading a value");
  }
}

}  // namespace lazyxla::graph
