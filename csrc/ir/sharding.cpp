#include "ir/sharding.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include "common/locks.h"

namespace lazyxla::ir {

std::atomic<bool> Mesh::any_{false};

// All that exist, by their texts.
struct Interned {
  std::map<std::string, std::unique_ptr<Mesh>> meshes;
  std::map<std::string, std::unique_ptr<Sharding>> shardings;
  uint64_t next_id = 1;

  static Guarded<Interned>& get() {
    static auto* instance = new Guarded<Interned>();
    return *instance;
  }

  const Mesh* mesh(std::vector<Mesh::Axis> axes, std::vector<int> devices);
  const Sharding* sharding(const Mesh& mesh, Sharding::Dimensions dimensions,
                           std::vector<bool> open);
};

namespace {

std::string text_of(const std::vector<Mesh::Axis>& axes, const std::vector<int>& devices) {
  std::string text;
  for (const Mesh::Axis& axis : axes) {
    text += (text.empty() ? "" : ", ") + axis.name + "=" + std::to_string(axis.size);
  }
  text += devices.size() == 1 ? " on device " : " on devices ";
  for (size_t i = 0; i < devices.size(); ++i) {
    size_t last = i;  // of a run of neighbours
    while (last + 1 < devices.size() && devices[last + 1] == devices[last] + 1) ++last;
    text += (i ? "," : "") + std::to_string(devices[i]);
    if (last > i) text += "-" + std::to_string(devices[last]);
    i = last;
  }
  return text;
}

std::string text_of(const Mesh& mesh, const Sharding::Dimensions& dimensions,
                    const std::vector<bool>& open) {
  std::string text = "(";
  for (size_t i = 0; i < dimensions.size(); ++i) {
    if (i) text += ", ";
    const bool is_open = !open.empty() && open[i];
    if (dimensions[i].empty() && !is_open) text += "-";
    for (size_t j = 0; j < dimensions[i].size(); ++j) {
      const AxisPart& part = dimensions[i][j];
      const Mesh::Axis& axis = mesh.axes()[part.axis];
      text += (j ? " " : "") + axis.name;
      if (part.size == axis.size) continue;
      text += ":(" + std::to_string(part.before) + ")" + std::to_string(part.size);
    }
    if (is_open) text += dimensions[i].empty() ? "?" : " ?";
  }
  return text + ") over " + mesh.text();
}

// Joins consecutive parts of an axis, and removes parts of length 1.
void simplify(std::vector<AxisPart>& parts) {
  std::vector<AxisPart> simple;
  for (const AxisPart& part : parts) {
    if (part.size == 1) continue;
    if (!simple.empty() && simple.back().axis == part.axis &&
        simple.back().before * simple.back().size == part.before) {
      simple.back().size *= part.size;
    } else {
      simple.push_back(part);
    }
  }
  parts = std::move(simple);
}

// The coordinate of a mesh position along a part of an axis.
int64_t coordinate(const Mesh& mesh, const AxisPart& part, size_t position) {
  const int64_t size = mesh.axes()[part.axis].size;
  const int64_t along = static_cast<int64_t>(position) / mesh.stride(part.axis) % size;
  return along / (size / part.before / part.size) % part.size;
}

// The axes in parts of prime length, outermost first.
std::vector<AxisPart> primes(const Mesh& mesh) {
  std::vector<AxisPart> parts;
  for (size_t axis = 0; axis < mesh.axes().size(); ++axis) {
    int64_t before = 1, left = mesh.axes()[axis].size;
    for (int64_t prime = 2; left > 1; ++prime) {
      for (; left % prime == 0; left /= prime, before *= prime) {
        parts.push_back({axis, before, prime});
      }
    }
  }
  return parts;
}

}  // namespace

bool Mesh::several() { return Interned::get().hold()->meshes.size() > 1; }

const Mesh* Interned::mesh(std::vector<Mesh::Axis> axes, std::vector<int> devices) {
  auto& mesh = meshes[text_of(axes, devices)];
  if (!mesh) {
    mesh.reset(new Mesh());
    mesh->axes_ = std::move(axes);
    mesh->devices_ = std::move(devices);
    mesh->id_ = next_id++;
    Mesh::any_ = true;
  }
  return mesh.get();
}

const Sharding* Interned::sharding(const Mesh& mesh, Sharding::Dimensions dimensions,
                                   std::vector<bool> open) {
  for (auto& parts : dimensions) simplify(parts);
  if (std::find(open.begin(), open.end(), true) == open.end()) open.clear();
  std::string text = text_of(mesh, dimensions, open);
  auto& sharding = shardings[text];
  if (!sharding) {
    sharding.reset(new Sharding());
    sharding->mesh_ = &mesh;
    sharding->dimensions_ = std::move(dimensions);
    sharding->open_ = std::move(open);
    sharding->text_ = std::move(text);
    sharding->id_ = next_id++;
  }
  return sharding.get();
}

const Mesh* Mesh::get(std::vector<Axis> axes, std::vector<int> devices) {
  return Interned::get().hold()->mesh(std::move(axes), std::move(devices));
}

int64_t Mesh::stride(size_t axis) const {
  int64_t stride = 1;
  for (size_t i = axis + 1; i < axes_.size(); ++i) stride *= axes_[i].size;
  return stride;
}

std::string Mesh::text() const { return text_of(axes_, devices_); }

const Sharding* Sharding::get(const Mesh& mesh, Dimensions dimensions, std::vector<bool> open) {
  return Interned::get().hold()->sharding(mesh, std::move(dimensions), std::move(open));
}

const Sharding* Sharding::replicated(const Mesh& mesh, size_t rank) {
  return get(mesh, Dimensions(rank));
}

const Sharding* Sharding::of_tiles(const Mesh& mesh, const std::vector<int64_t>& tiles,
                                   const std::function<std::vector<int64_t>(size_t)>& tile_of) {
  // One step along a part of an axis moves a device to another tile of one dimension, or of none.
  struct Split {
    AxisPart part;
    int64_t step;
  };
  std::vector<std::vector<Split>> splits(tiles.size());
  const std::vector<int64_t> origin = tile_of(0);
  for (const AxisPart& part : primes(mesh)) {
    const int64_t size = mesh.axes()[part.axis].size;
    const auto next =
        static_cast<size_t>(mesh.stride(part.axis) * (size / part.before / part.size));
    const std::vector<int64_t> moved = tile_of(next);
    for (size_t i = 0; i < tiles.size(); ++i) {
      if (moved[i] != origin[i]) splits[i].push_back({part, moved[i] - origin[i]});
    }
  }
  Dimensions dimensions;
  for (auto& dimension : splits) {
    std::stable_sort(dimension.begin(), dimension.end(),
                     [](const Split& a, const Split& b) { return a.step > b.step; });
    dimensions.emplace_back();
    for (const Split& split : dimension) dimensions.back().push_back(split.part);
  }
  const Sharding* sharding = get(mesh, std::move(dimensions));
  for (size_t i = 0; i < tiles.size(); ++i) {
    if (sharding->tiles(i) != tiles[i]) return nullptr;
  }
  for (size_t position = 0; position < mesh.size(); ++position) {
    if (sharding->tile_of(position) != tile_of(position)) return nullptr;
  }
  return sharding;
}

const Sharding* Sharding::find(const std::string& text) {
  const auto all = Interned::get().hold();
  const auto found = all->shardings.find(text);
  return found == all->shardings.end() ? nullptr : found->second.get();
}

bool Sharding::is_replicated() const {
  return !is_open() && std::all_of(dimensions_.begin(), dimensions_.end(),
                                   [](const auto& parts) { return parts.empty(); });
}

int64_t Sharding::tiles(size_t dimension) const {
  int64_t tiles = 1;
  for (const AxisPart& part : dimensions_[dimension]) tiles *= part.size;
  return tiles;
}

Dims Sharding::shard(c10::IntArrayRef sizes) const {
  Dims shard(sizes.begin(), sizes.end());
  for (size_t i = 0; i < rank(); ++i) shard[i] = (shard[i] + tiles(i) - 1) / tiles(i);
  return shard;
}

std::vector<int64_t> Sharding::tile_of(size_t position) const {
  std::vector<int64_t> tile;
  for (const auto& parts : dimensions_) {
    int64_t number = 0;
    for (const AxisPart& part : parts) {
      number = number * part.size + coordinate(*mesh_, part, position);
    }
    tile.push_back(number);
  }
  return tile;
}

bool Sharding::distributes_like(const Sharding& other) const {
  if (mesh_->devices() != other.mesh_->devices() || rank() != other.rank()) return false;
  for (size_t i = 0; i < rank(); ++i) {
    if (tiles(i) != other.tiles(i)) return false;
  }
  for (size_t position = 0; position < mesh_->size(); ++position) {
    if (tile_of(position) != other.tile_of(position)) return false;
  }
  return true;
}

}  // namespace lazyxla::ir
