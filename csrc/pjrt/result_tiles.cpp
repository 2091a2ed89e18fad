#include "result_tiles.h"

#include <numeric>
#include <optional>
#include <string_view>

#include "error.h"

namespace lazyxla::pjrt {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(
      PJRT_Error_Code_UNIMPLEMENTED,
      "the compiled program does not tell how its results are spread over the devices: " + what);
}

// Reads a message in the protocol buffer wire format, field by field.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}

  // Goes to the next field; false at the end.
  bool next() {
    if (bytes_.empty()) return false;
    const uint64_t key = varint();
    field = static_cast<int>(key >> 3);
    message = {};
    switch (key & 7) {
      case 0:
        number = varint();
        break;
      case 1:
        take(8);
        break;
      case 2:
        message = take(varint());
        break;
      case 5:
        take(4);
        break;
      default:
        refuse("it is no protocol buffer");
    }
    return true;
  }

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<uint8_t>(take(1)[0]);
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    refuse("it is no protocol buffer");
  }

  bool at_end() const { return bytes_.empty(); }

  int field = 0;
  uint64_t number = 0;       // of a field that is one
  std::string_view message;  // of any other

 private:
  std::string_view take(uint64_t size) {
    if (size > bytes_.size()) refuse("it ends too early");
    const std::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  std::string_view bytes_;
};

// Field numbers: XLA's hlo.proto and xla_data.proto.
enum HloModule { kResultSharding = 12 };
enum OpSharding {
  kType = 1,
  kTileDims = 3,
  kTileDevices = 4,
  kTupleShardings = 5,
  kReplicateOnLast = 6,
  kLastTileDims = 8,
  kIotaReshape = 9,
  kIotaTranspose = 10,
};
enum Type { kReplicated = 0, kMaximal = 1, kTuple = 2, kOther = 3 };

struct Sharding {
  uint64_t type = kReplicated;
  std::vector<int64_t> tile_dims, devices, iota_reshape, iota_transpose;
  size_t last_dims = 0;  // of tile_dims, along which the tiles are the same
  std::vector<std::string_view> elements;
};

void add_numbers(const WireReader& reader, std::vector<int64_t>& numbers) {
  if (reader.message.data() == nullptr) {
    numbers.push_back(static_cast<int64_t>(reader.number));
    return;
  }
  WireReader packed(reader.message);
  while (!packed.at_end()) numbers.push_back(static_cast<int64_t>(packed.varint()));
}

Sharding parse(std::string_view bytes) {
  Sharding sharding;
  std::vector<int64_t> last;
  WireReader reader(bytes);
  while (reader.next()) {
    switch (reader.field) {
      case kType:
        sharding.type = reader.number;
        break;
      case kTileDims:
        add_numbers(reader, sharding.tile_dims);
        break;
      case kTileDevices:
        add_numbers(reader, sharding.devices);
        break;
      case kTupleShardings:
        sharding.elements.push_back(reader.message);
        break;
      case kReplicateOnLast:
        sharding.last_dims = reader.number ? 1 : 0;
        break;
      case kLastTileDims:
        add_numbers(reader, last);
        break;
      case kIotaReshape:
        add_numbers(reader, sharding.iota_reshape);
        break;
      case kIotaTranspose:
        add_numbers(reader, sharding.iota_transpose);
        break;
      default:
        break;
    }
  }
  if (!last.empty()) sharding.last_dims = last.size();
  return sharding;
}

int64_t product(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

// The partitions tile by tile: written out, or as 0, 1, 2 ... in a shape that is then transposed.
std::vector<int64_t> partitions_of(const Sharding& sharding) {
  if (sharding.iota_reshape.empty()) return sharding.devices;
  const auto& shape = sharding.iota_reshape;
  const auto& order = sharding.iota_transpose;
  if (order.size() != shape.size()) refuse("a transposition of another rank");
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  std::vector<int64_t> partitions, index(shape.size(), 0);
  for (int64_t count = product(shape); count > 0; --count) {
    int64_t partition = 0;
    for (size_t i = 0; i < order.size(); ++i) partition += index[i] * strides[order[i]];
    partitions.push_back(partition);
    for (size_t i = order.size(); i-- > 0;) {
      if (++index[i] < shape[order[i]]) break;
      index[i] = 0;
    }
  }
  return partitions;
}

ResultTiles tiles_of(const Sharding& sharding, size_t rank, size_t partitions) {
  ResultTiles result{std::vector<int64_t>(rank, 1),
                     std::vector<std::vector<int64_t>>(partitions, std::vector<int64_t>(rank, 0))};
  if (sharding.type == kReplicated || (sharding.type == kMaximal && partitions == 1)) return result;
  if (sharding.type != kOther || sharding.tile_dims.size() != rank + sharding.last_dims) {
    refuse("a sharding of another kind (" + std::to_string(sharding.type) + ")");
  }
  const std::vector<int64_t> order = partitions_of(sharding);
  if (order.size() != partitions ||
      product(sharding.tile_dims) != static_cast<int64_t>(partitions)) {
    refuse("a sharding over another number of devices");
  }
  result.tiles.assign(sharding.tile_dims.begin(), sharding.tile_dims.begin() + rank);
  for (size_t place = 0; place < order.size(); ++place) {
    if (order[place] < 0 || order[place] >= static_cast<int64_t>(partitions)) refuse("a device");
    auto left = static_cast<int64_t>(place);
    for (size_t i = sharding.tile_dims.size(); i-- > 0; left /= sharding.tile_dims[i]) {
      if (i < rank) result.tile_of[order[place]][i] = left % sharding.tile_dims[i];
    }
  }
  return result;
}

std::optional<std::string_view> field_of(std::string_view message, int field) {
  std::optional<std::string_view> found;
  WireReader reader(message);
  while (reader.next()) {
    if (reader.field == field) found = reader.message;
  }
  return found;
}

}  // namespace

std::vector<ResultTiles> result_tiles(const CompiledProgram& program,
                                      const std::vector<size_t>& ranks, size_t partitions) {
  std::vector<ResultTiles> results;
  if (partitions == 1) {
    for (size_t rank : ranks) results.push_back(tiles_of({}, rank, 1));
    return results;
  }
  const CompiledProgram::Optimized optimized = program.optimized_program();
  std::string_view module = optimized.bytes;
  if (optimized.format == "hlo_with_config") {
    const auto inner = field_of(module, 1);
    if (!inner) refuse("it has no module");
    module = *inner;
  } else if (optimized.format != "hlo") {
    refuse("its format is " + optimized.format);
  }
  const auto found = field_of(module, kResultSharding);
  if (!found) refuse("no sharding is noted");
  const Sharding all = parse(*found);
  if (all.type != kTuple) {
    if (ranks.size() != 1) refuse("a sharding for one result");
    results.push_back(tiles_of(all, ranks[0], partitions));
    return results;
  }
  if (all.elements.size() != ranks.size()) refuse("shardings for other results");
  for (size_t i = 0; i < ranks.size(); ++i) {
    results.push_back(tiles_of(parse(all.elements[i]), ranks[i], partitions));
  }
  return results;
}

}  // namespace lazyxla::pjrt
