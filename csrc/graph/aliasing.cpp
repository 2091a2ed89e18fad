#include "graph/aliasing.h"

#include <c10/util/Exception.h>

#include <optional>

#include "common/counters.h"
#include "common/gil.h"
#include "graph/execute.h"
#include "graph/transfer.h"
#include "pjrt/client.h"
#include "pjrt/host_view.h"
#include "pjrt/runtime.h"
#include "pjrt/shared_client.h"
#include "program/buffer.h"

namespace lazyxla::graph {
namespace {

bool lies_at(const pjrt::Buffer& buffer, const void* data) {
  const auto view = pjrt::HostView::of(buffer);
  return view && view->data() == data;
}

}  // namespace

ir::Value share(const void* data, const ir::TensorType& type, c10::DeviceIndex device,
                std::function<void()> done) {
  if (data_is_abstract()) {
    done();
    return program::make_abstract_leaf(type);
  }
  const pjrt::Device& target = pjrt_device(device);
  std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
  WithoutGil no_gil;
  try {
    pjrt::Buffer buffer = pjrt::Runtime::get().client().buffer_from_lasting_memory(
        PJRT_HostBufferSemantics_kImmutableZeroCopy, data, program::pjrt_type(type.dtype), dims,
        target, std::move(done));
    if (!lies_at(buffer, data)) ++Counters::get().uploads;
    return program::make_leaf(type, std::move(buffer));
  } catch (const pjrt::Error& e) {
    rethrow(e, "sharing memory with the device");
  }
}

Memory memory_of(const ir::Value& leaf) {
  struct Owner {
    program::BufferRef buffer;
    std::optional<pjrt::HostView> view;  // destroyed before the buffer
  };
  auto owner = std::make_shared<Owner>(program::buffer_ref(*leaf.node.get()));
  WithoutGil no_gil;
  pjrt::Buffer& buffer = owner->buffer->get();
  try {
    if (auto view = pjrt::HostView::of(buffer)) owner->view.emplace(std::move(*view));
  } catch (const pjrt::Error& e) {
    rethrow(e, "reading a value");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(owner->view,
                              "lazyxla: the memory of this device is not the host's: copy the "
                              "tensor with .cpu() instead");
  const void* data = owner->view->data();
  return {data, std::move(owner)};
}

void lend(const ir::Value& leaf, const std::function<void()>& take) {
  const program::BufferRef buffer =
      program::buffer_ref(*leaf.node.get());  // is not donated meanwhile
  try {
    pjrt::lend(buffer->get(), take);
  } catch (const pjrt::Error& e) {
    rethrow(e, "lending a value");
  }
}

std::pair<ir::Value, c10::DeviceIndex> borrow(const ir::TensorType& type,
                                              const std::function<void()>& ask) {
  try {
    pjrt::Buffer buffer = pjrt::borrow(ask);
    const auto device = static_cast<c10::DeviceIndex>(buffer.device().index());
    return {program::make_leaf(type, std::move(buffer)), device};
  } catch (const pjrt::Error& e) {
    rethrow(e, "borrowing a value");
  }
}

bool map_host_memory(void* data, size_t nbytes) {
  return pjrt::Runtime::get().client().map_host_memory(data, nbytes);
}

void unmap_host_memory(void* data) { pjrt::Runtime::get().client().unmap_host_memory(data); }

ir::Value upload_mapped(const void* data, const ir::TensorType& type, c10::DeviceIndex device,
                        std::function<void()> done) {
  if (data_is_abstract()) {
    done();
    return program::make_abstract_leaf(type);
  }
  ++Counters::get().uploads;
  const pjrt::Device& target = pjrt_device(device);
  std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
  try {
    return program::make_leaf(type,
                              pjrt::Runtime::get().client().buffer_from_lasting_memory(
                                  PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes, data,
                                  program::pjrt_type(type.dtype), dims, target, std::move(done)));
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to the device");
  }
}

}  // namespace lazyxla::graph
