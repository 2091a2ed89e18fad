#include "graph/execute.h"

#include <c10/util/Exception.h>

#include <optional>

#include "graph/gil.h"
#include "options.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {
namespace {

// Packs the values of variable slots into one small array on the device.
template <typename T>
pjrt::Buffer upload_slots(const std::vector<uint32_t>& which, c10::ArrayRef<ir::ScalarValue> slots,
                          T ir::ScalarValue::* member, PJRT_Buffer_Type type,
                          const pjrt::Device& device) {
  c10::SmallVector<T, 16> values;
  for (uint32_t slot : which) values.push_back(slots[slot].*member);
  int64_t dims[] = {static_cast<int64_t>(values.size())};
  return pjrt::Runtime::get().client().buffer_from_host(values.data(), type, dims, {}, device);
}

}  // namespace

const pjrt::Device& pjrt_device(c10::DeviceIndex device) {
  const auto& devices = pjrt::Runtime::get().client().devices();
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < devices.size(),
              "lazyxla: invalid device ordinal ", static_cast<int>(device), ": there are ",
              devices.size(), " devices");
  return devices[device];
}

void rethrow(const pjrt::Error& error, const char* doing) {
  TORCH_CHECK_WITH(OutOfMemoryError, error.code() != PJRT_Error_Code_RESOURCE_EXHAUSTED,
                   "lazyxla: out of device memory while ", doing, ": ", error.what());
  TORCH_CHECK(false, "lazyxla: ", doing, ": ", error.what());
}

void keeping(c10::ArrayRef<BufferRef> promises, c10::function_ref<void()> action) {
  auto break_promises = [&](const std::string& reason) {
    for (const auto& promise : promises) {
      promise->break_promise(
          "lazyxla: this value was not computed, because running the recorded "
          "operators failed before: " +
          reason);
    }
  };
  try {
    try {
      action();
    } catch (const pjrt::Error& e) {
      rethrow(e, "running the recorded operators");
    }
  } catch (const c10::Error& e) {
    break_promises(e.what_without_backtrace());
    throw;
  } catch (const std::exception& e) {
    break_promises(e.what());
    throw;
  }
}

void execute(const Run& run, c10::DeviceIndex index) {
  const pjrt::Device& device = pjrt_device(index);
  const Variant& variant = *run.variant;
  const pjrt::Executable& executable = variant.executable();
  c10::SmallVector<pjrt::Buffer*, 16> args;
  for (const BufferRef& input : run.inputs) args.push_back(&input->get());
  std::optional<pjrt::Buffer> floats, ints;
  if (!variant.float_slots.empty()) {
    floats.emplace(upload_slots(variant.float_slots, run.slots, &ir::ScalarValue::f,
                                PJRT_Buffer_Type_F64, device));
    args.push_back(&*floats);
  }
  if (!variant.int_slots.empty()) {
    ints.emplace(upload_slots(variant.int_slots, run.slots, &ir::ScalarValue::i,
                              PJRT_Buffer_Type_S64, device));
    args.push_back(&*ints);
  }
  variant.note_run();
  auto results = executable.execute(args, variant.donated_args, device);
  TORCH_INTERNAL_ASSERT(results.size() == run.promises.size());
  for (size_t i = 0; i < results.size(); ++i) run.promises[i]->keep(std::move(results[i]));
  if (options().blocking) {
    WithoutGil no_gil;
    for (const BufferRef& promise : run.promises) promise->get().await();
  }
}

void wait_for(c10::DeviceIndex device) {
  if (!pjrt::Runtime::get().initialized()) return;
  WithoutGil no_gil;
  try {
    pjrt_device(device).await();
  } catch (const pjrt::Error& e) {
    rethrow(e, "waiting for the device");
  }
}

}  // namespace lazyxla::graph
