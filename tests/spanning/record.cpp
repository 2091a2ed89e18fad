#include "record.h"

#include <cstring>
#include <numeric>
#include <stdexcept>

#include "call.h"

namespace spanning {
namespace {

// minor_to_major of an array that lies in row-major order.
std::vector<int64_t> row_major(size_t rank) {
  std::vector<int64_t> order(rank);
  for (size_t i = 0; i < rank; ++i) order[i] = static_cast<int64_t>(rank - 1 - i);
  return order;
}

PJRT_Buffer_MemoryLayout layout_of(const std::vector<int64_t>& minor_to_major) {
  PJRT_Buffer_MemoryLayout layout{};
  layout.struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE;
  layout.type = PJRT_Buffer_MemoryLayout_Type_Tiled;
  layout.tiled.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE;
  layout.tiled.minor_to_major = minor_to_major.data();
  layout.tiled.minor_to_major_size = minor_to_major.size();
  return layout;
}

void await(PJRT_Event* event) {
  if (event == nullptr) return;
  SPANNING_ARGS(args, PJRT_Event_Await);
  args.event = event;
  PJRT_Error* error = cpu()->PJRT_Event_Await(&args);
  SPANNING_ARGS(destroy, PJRT_Event_Destroy);
  destroy.event = event;
  check(cpu()->PJRT_Event_Destroy(&destroy));
  check(error);
}

std::vector<int64_t> device_layout(PJRT_Buffer* buffer, size_t rank) {
  SPANNING_ARGS(args, PJRT_Buffer_GetMemoryLayout);
  args.buffer = buffer;
  SPANNING_CALL(PJRT_Buffer_GetMemoryLayout, args);
  if (args.layout.type != PJRT_Buffer_MemoryLayout_Type_Tiled || args.layout.tiled.num_tiles > 0) {
    fail(PJRT_Error_Code_UNIMPLEMENTED, "an argument in a layout of strides or tiles");
  }
  const int64_t* order = args.layout.tiled.minor_to_major;
  std::vector<int64_t> minor_to_major(order, order + args.layout.tiled.minor_to_major_size);
  if (minor_to_major == row_major(rank)) minor_to_major.clear();
  return minor_to_major;
}

class Writer {
 public:
  std::string bytes;

  void number(int64_t value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void numbers(const std::vector<int64_t>& values) {
    number(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) number(value);
  }
  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    bytes += value;
  }
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  int64_t number() {
    int64_t value;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return value;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> values(static_cast<size_t>(number()));
    for (int64_t& value : values) value = number();
    return values;
  }
  std::string text() {
    const auto size = static_cast<size_t>(number());
    return std::string(take(size), size);
  }

 private:
  const char* take(size_t size) {
    if (size > bytes_.size() - position_) {
      throw std::runtime_error("another process' record ends too early");
    }
    const char* begin = bytes_.data() + position_;
    position_ += size;
    return begin;
  }

  const std::string& bytes_;
  size_t position_ = 0;
};

}  // namespace

Value Value::of(PJRT_Buffer* buffer) {
  SPANNING_ARGS(type, PJRT_Buffer_ElementType);
  type.buffer = buffer;
  SPANNING_CALL(PJRT_Buffer_ElementType, type);
  SPANNING_ARGS(dims, PJRT_Buffer_Dimensions);
  dims.buffer = buffer;
  SPANNING_CALL(PJRT_Buffer_Dimensions, dims);
  Value value{.type = type.type,
              .dims = std::vector<int64_t>(dims.dims, dims.dims + dims.num_dims),
              .minor_to_major = device_layout(buffer, dims.num_dims),
              .data = {}};

  const std::vector<int64_t> order = row_major(dims.num_dims);
  PJRT_Buffer_MemoryLayout layout = layout_of(order);
  SPANNING_ARGS(copy, PJRT_Buffer_ToHostBuffer);
  copy.src = buffer;
  copy.host_layout = &layout;
  SPANNING_CALL(PJRT_Buffer_ToHostBuffer, copy);  // tells the size
  value.data.resize(copy.dst_size);
  copy.dst = value.data.data();
  SPANNING_CALL(PJRT_Buffer_ToHostBuffer, copy);
  await(copy.event);
  return value;
}

PJRT_Buffer* Value::on(PJRT_Client* client, PJRT_Device* device) const {
  PJRT_Buffer_MemoryLayout layout = layout_of(minor_to_major);
  SPANNING_ARGS(args, PJRT_Client_BufferFromHostBuffer);
  args.client = client;
  args.data = data.data();
  args.type = type;
  args.dims = dims.data();
  args.num_dims = dims.size();
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  args.device = device;
  // The CPU plugin of today copies bytes as they lie, both ways, whatever layout is asked for,
  // which comes to the same.
  args.device_layout = minor_to_major.empty() ? nullptr : &layout;
  SPANNING_CALL(PJRT_Client_BufferFromHostBuffer, args);
  await(args.done_with_host_buffer);
  return args.buffer;
}

std::string Record::encode() const {
  Writer writer;
  writer.number(static_cast<int64_t>(fingerprint));
  writer.text(failure);
  writer.number(static_cast<int64_t>(arguments.size()));
  for (const std::vector<Value>& row : arguments) {
    writer.number(static_cast<int64_t>(row.size()));
    for (const Value& value : row) {
      writer.number(value.type);
      writer.numbers(value.dims);
      writer.numbers(value.minor_to_major);
      writer.text(value.data);
    }
  }
  return std::move(writer.bytes);
}

Record Record::decode(const std::string& bytes) {
  Reader reader(bytes);
  Record record;
  record.fingerprint = static_cast<uint64_t>(reader.number());
  record.failure = reader.text();
  record.arguments.resize(static_cast<size_t>(reader.number()));
  for (std::vector<Value>& row : record.arguments) {
    row.resize(static_cast<size_t>(reader.number()));
    for (Value& value : row) {
      value.type = static_cast<PJRT_Buffer_Type>(reader.number());
      value.dims = reader.numbers();
      value.minor_to_major = reader.numbers();
      value.data = reader.text();
    }
  }
  return record;
}

}  // namespace spanning
