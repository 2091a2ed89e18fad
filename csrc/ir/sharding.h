// Sharding: how a value is spread over many devices.
//
// A mesh is a grid of devices with named axes; a sharding says for each dimension of a value along
// which axes it is split, outermost first. Along the other axes the devices hold the same. Over a
// mesh of 2 x 2 devices, "data" and "model":
//
//     [8, 6] split by (data, -)              [8, 6] split by (data model, -)
//
//     0, 1: rows 0-3    2, 3: rows 4-7       0: rows 0-1   1: 2-3   2: 4-5   3: 6-7
//
// A dimension that does not divide evenly is split as if it were longer: 7 rows over 4 devices are
// shards of 2 rows, of which the last has one row and one of padding, whose content means nothing.
//
// The value stays one value: code that computes with it knows nothing of shards. Both kinds of
// objects are interned and never freed: the same mesh or sharding is the same pointer, and may be
// compared by it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ir/geometry.h"

namespace lazyxla::ir {

class Mesh {
 public:
  struct Axis {
    std::string name;
    int64_t size;
    bool operator==(const Axis&) const = default;
  };

  // `devices` are positions among the client's, row by row: as many as the axes' sizes make.
  static const Mesh* get(std::vector<Axis> axes, std::vector<int> devices);
  // Whether there is any. Where there is none, no value is sharded.
  static bool any() { return any_.load(std::memory_order_relaxed); }
  static bool several();

  const std::vector<Axis>& axes() const { return axes_; }
  const std::vector<int>& devices() const { return devices_; }
  size_t size() const { return devices_.size(); }
  uint64_t id() const { return id_; }
  // How far apart neighbours along an axis are among the devices.
  int64_t stride(size_t axis) const;
  // "data=2, model=4 on devices 0-7"
  std::string text() const;

 private:
  friend struct Interned;
  Mesh() = default;
  static std::atomic<bool> any_;
  std::vector<Axis> axes_;
  std::vector<int> devices_;
  uint64_t id_ = 0;
};

// An axis, or a part of one: `size` is its length, `before` the product of the lengths of the parts
// outside it. Partitioners split axes. A whole axis has `before` 1.
struct AxisPart {
  size_t axis;
  int64_t before, size;
  bool operator==(const AxisPart&) const = default;
};

class Sharding {
 public:
  using Dimensions = std::vector<std::vector<AxisPart>>;

  // One entry per dimension. Parts of length 1 are left out, neighbouring ones joined. Dimensions
  // that a partitioner may split further are `open`; if it is empty, none is. Only values within a
  // program have open dimensions.
  static const Sharding* get(const Mesh& mesh, Dimensions dimensions, std::vector<bool> open = {});
  static const Sharding* replicated(const Mesh& mesh, size_t rank);
  // Made from the number of tiles of each dimension, and the tile that each position in the mesh
  // holds. Null if no axes describe that.
  static const Sharding* of_tiles(const Mesh& mesh, const std::vector<int64_t>& tiles,
                                  const std::function<std::vector<int64_t>(size_t)>& tile_of);
  // One that exists already, by its text; null if none has it.
  static const Sharding* find(const std::string& text);

  const Mesh& mesh() const { return *mesh_; }
  const Dimensions& dimensions() const { return dimensions_; }
  size_t rank() const { return dimensions_.size(); }
  uint64_t id() const { return id_; }
  bool is_open(size_t dimension) const { return !open_.empty() && open_[dimension]; }
  bool is_open() const { return !open_.empty(); }

  // Whether every device of the mesh has the whole.
  bool is_replicated() const;

  // How many tiles a dimension is split into; the shape of a shard, its padding included.
  int64_t tiles(size_t dimension) const;
  Dims shard(c10::IntArrayRef sizes) const;
  // Which tile of each dimension the device at a position in the mesh holds.
  std::vector<int64_t> tile_of(size_t position) const;
  // Whether both give every device the same tiles.
  bool distributes_like(const Sharding& other) const;

  // Mesh and dimensions; the same in every process.
  const std::string& text() const { return text_; }

 private:
  friend struct Interned;
  Sharding() = default;
  const Mesh* mesh_ = nullptr;
  Dimensions dimensions_;
  std::vector<bool> open_;  // empty if none is
  std::string text_;
  uint64_t id_ = 0;
};

}  // namespace lazyxla::ir
