// Execution: one run of a compiled program, whose results were promised before.
//
// Whoever runs something first gives the storages that take the results leaves on promised buffers
// (buffer.h), then comes here. If the run fails, the promises are broken with the reason, so that
// every later read tells it, and the reason is thrown.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include "graph/buffer.h"
#include "graph/program.h"
#include "pjrt/error.h"

namespace lazyxla::graph {

// What a run takes. It only refers to its parts.
struct Run {
  const std::shared_ptr<const Variant>& variant;
  c10::ArrayRef<BufferRef> inputs;
  c10::ArrayRef<ir::ScalarValue> slots;  // of the graph that the variant was compiled for
  c10::ArrayRef<BufferRef> promises;     // one per output
};

// Does `action`; if it throws, breaks the promises, and rethrows as an error of PyTorch.
void keeping(c10::ArrayRef<BufferRef> promises, c10::function_ref<void()> action);

// Enqueues a run on the device and keeps its promises. With LAZYXLA_BLOCKING it also waits for the
// results.
void execute(const Run& run, c10::DeviceIndex device);

// Waits until the device has done what was enqueued. Execution errors surface.
void wait_for(c10::DeviceIndex device);

// The device's end of the runtime; throws if there is no such device.
const pjrt::Device& pjrt_device(c10::DeviceIndex device);

// Out of device memory is torch.OutOfMemoryError, as for any accelerator.
[[noreturn]] void rethrow(const pjrt::Error& error, const char* doing);

}  // namespace lazyxla::graph
