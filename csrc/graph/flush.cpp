#include "graph/flush.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include <array>

#include "graph/counters.h"
#include "graph/gil.h"
#include "graph/program.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

// What a device ran last, so that sync(wait=True) knows what to wait for.
struct LastRun {
  std::mutex mutex;
  std::vector<std::weak_ptr<DeviceBuffer>> outputs;
};

LastRun& last_run(c10::DeviceIndex device) {
  static auto* runs = new std::array<LastRun, 256>();
  return (*runs)[static_cast<uint8_t>(device)];
}

// Out of device memory is torch.OutOfMemoryError, as for any accelerator.
[[noreturn]] void rethrow(const pjrt::Error& error, const char* doing) {
  TORCH_CHECK_WITH(OutOfMemoryError, error.code() != PJRT_Error_Code_RESOURCE_EXHAUSTED,
                   "lazyxla: out of device memory while ", doing, ": ", error.what());
  TORCH_CHECK(false, "lazyxla: ", doing, ": ", error.what());
}

// The global settings of torch that a lowering depends on.
uint64_t global_setting() {
  return (static_cast<uint64_t>(at::globalContext().float32MatmulPrecision()) << 8) |
         static_cast<uint64_t>(c10::get_default_dtype_as_scalartype());
}

// Packs the values of variable slots into one small array on the device.
template <typename T>
std::unique_ptr<pjrt::Buffer> upload_slots(const std::vector<uint32_t>& which, const Graph& graph,
                                           T ir::ScalarValue::* member, PJRT_Buffer_Type type,
                                           const pjrt::Device& device) {
  c10::SmallVector<T, 16> values;
  for (uint32_t slot : which) values.push_back(graph.slots[slot].*member);
  int64_t dims[] = {static_cast<int64_t>(values.size())};
  return pjrt::Runtime::get().client().buffer_from_host(values.data(), type, dims, {}, device);
}

void run(Graph& graph, const pjrt::Device& device) {
  std::shared_ptr<const Variant> variant = find_program(graph)->variant(graph);
  std::vector<pjrt::Buffer*> args;
  args.reserve(graph.leaves.size() + 2);
  for (const ir::NodePtr& leaf : graph.leaves) args.push_back(&buffer_of(*leaf.get()).get());
  std::unique_ptr<pjrt::Buffer> floats, ints;
  if (!variant->float_slots.empty()) {
    floats = upload_slots(variant->float_slots, graph, &ir::ScalarValue::f, PJRT_Buffer_Type_F64,
                          device);
    args.push_back(floats.get());
  }
  if (!variant->int_slots.empty()) {
    ints =
        upload_slots(variant->int_slots, graph, &ir::ScalarValue::i, PJRT_Buffer_Type_S64, device);
    args.push_back(ints.get());
  }
  auto results = variant->executable->execute(args, variant->donated_args, device);
  ++Counters::get().executions;
  TORCH_INTERNAL_ASSERT(results.size() == graph.promises.size());
  for (size_t i = 0; i < results.size(); ++i) graph.promises[i]->keep(std::move(results[i]));
}

}  // namespace

const pjrt::Device& pjrt_device(c10::DeviceIndex device) {
  const auto& devices = pjrt::Runtime::get().client().devices();
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < devices.size(),
              "lazyxla: invalid device ordinal ", static_cast<int>(device), ": there are ",
              devices.size(), " devices");
  return devices[device];
}

void flush(c10::DeviceIndex device) {
  ir::PendingSet& pending = ir::PendingSet::of(device);
  Graph graph;
  {
    std::lock_guard lock(pending.mutex);
    if (!pending.first) return;
    graph = detach(pending, global_setting());
  }
  ++Counters::get().flushes;
  auto break_promises = [&](const std::string& reason) {
    for (auto& promise : graph.promises) {
      promise->break_promise(
          "lazyxla: this value was not computed, because running the recorded "
          "operators failed before: " +
          reason);
    }
  };
  try {
    try {
      run(graph, pjrt_device(device));
    } catch (const pjrt::Error& e) {
      rethrow(e, "running the recorded operators");
    } catch (const LoweringFailure& e) {
      restore(pending, graph, e.node);
      TORCH_CHECK_NOT_IMPLEMENTED(false, e.what());
    }
  } catch (const c10::Error& e) {
    break_promises(e.what_without_backtrace());
    throw;
  } catch (const std::exception& e) {
    break_promises(e.what());
    throw;
  }
  graph.taken.clear();
  LastRun& last = last_run(device);
  std::lock_guard lock(last.mutex);
  last.outputs.assign(graph.promises.begin(), graph.promises.end());
}

void sync(c10::DeviceIndex device, bool wait) {
  flush(device);
  if (!wait) return;
  std::vector<std::weak_ptr<DeviceBuffer>> outputs;
  {
    std::lock_guard lock(last_run(device).mutex);
    outputs = last_run(device).outputs;
  }
  WithoutGil no_gil;
  for (const auto& output : outputs) {
    auto buffer = output.lock();
    if (!buffer || buffer->get().is_deleted()) continue;
    try {
      buffer->get().await();
    } catch (const pjrt::Error& e) {
      rethrow(e, "waiting for the device");
    }
  }
}

std::unique_ptr<pjrt::Buffer> upload(const void* data, const ir::TensorType& type,
                                     c10::DeviceIndex device) {
  ++Counters::get().uploads;
  const pjrt::Device& target = pjrt_device(device);
  std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
  try {
    return pjrt::Runtime::get().client().buffer_from_host(data, pjrt_type(type.dtype), dims, {},
                                                          target);
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to the device");
  }
}

void download(const ir::Value& leaf, void* destination) {
  ++Counters::get().downloads;
  WithoutGil no_gil;
  pjrt::Buffer& buffer = buffer_of(*leaf.node.get()).get();
  try {
    buffer.to_host(destination, leaf.type().nbytes());
  } catch (const pjrt::Error& e) {
    rethrow(e, "reading a value");
  }
}

}  // namespace lazyxla::graph
