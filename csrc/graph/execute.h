// Execution: one run of a compiled program, whose results were promised before.
//
// Whoever runs something first gives the storages that take the results leaves on promised buffers
// (buffer.h), then comes here. If the run fails, the promises are broken with the reason, so that
// every later read tells it, and the reason is thrown.
#pragma once

#include <c10/core/Device.h>

#include <functional>

#include "graph/buffer.h"
#include "graph/program.h"
#include "pjrt/error.h"

namespace lazyxla::graph {

using Promises = c10::ArrayRef<std::shared_ptr<DeviceBuffer>>;

// Runs `action`; if it throws, breaks the promises, and rethrows as an error of PyTorch.
void keeping(Promises promises, const char* doing, const std::function<void()>& action);

// Enqueues one run and keeps the promises, one per output. With LAZYXLA_BLOCKING it also waits for
// the results. `slots` are those of the graph the variant was compiled for.
void execute(const Variant& variant, c10::ArrayRef<ir::NodePtr> leaves,
             c10::ArrayRef<ir::ScalarValue> slots, Promises promises, c10::DeviceIndex device);

// Waits until the device has done what was enqueued. Execution errors surface.
void wait_for(c10::DeviceIndex device);

// The device's end of the runtime; throws if there is no such device.
const pjrt::Device& pjrt_device(c10::DeviceIndex device);

// Out of device memory is torch.OutOfMemoryError, as for any accelerator.
[[noreturn]] void rethrow(const pjrt::Error& error, const char* doing);

}  // namespace lazyxla::graph
