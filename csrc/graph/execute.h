// Execution: one run of a compiled program, whose results were promised before.
//
// The caller first gives each storage that takes a result a leaf on a promised buffer
// (program/buffer.h). If the run fails, now or later on the device, the storages have what they had
// before (undo.h) and the promises are broken with the reason, which every later read reports; a
// failure that is known now is thrown, too.
//
// A program that does not fit in the memory that is free is refused before it is given anything.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "graph/undo.h"
#include "pjrt/error.h"
#include "program/buffer.h"
#include "program/program.h"

namespace lazyxla::graph {

// What a run takes. It only refers to its parts.
struct Run {
  c10::ArrayRef<program::BufferRef> inputs;
  c10::ArrayRef<int> donated;                  // which inputs the program may consume, ascending
  c10::ArrayRef<ir::ScalarValue> slots;        // of the graph that the program was compiled for
  c10::ArrayRef<program::BufferRef> promises;  // one per output
  std::vector<Replaced>& replaced;             // taken
  const std::vector<ir::Draws>& draws;
};

// Does `action`; if it throws, undoes the run, breaks its promises, and rethrows as an error of
// PyTorch.
void keeping(const Run& run, c10::DeviceIndex device, c10::function_ref<void()> action);

// Whether the host computes a part of it whose inputs are not ready yet.
bool would_wait(const program::Variant& variant, const Run& run);

// Enqueues a run on the device and keeps its promises.
void execute(const program::Variant& variant, const Run& run, c10::DeviceIndex device);

// Throws if a program that needs `needed` bytes does not fit in the device's free memory.
void check_free(const program::Variant& variant, int64_t needed, const pjrt::Device& device);

// The numbers that are a program's inputs: an array of the floats on each device, then of integers.
using Numbers = c10::SmallVector<pjrt::Buffer, 2>;
void upload_numbers(const program::Variant& variant, c10::ArrayRef<ir::ScalarValue> slots,
                    c10::ArrayRef<const pjrt::Device*> devices, Numbers& numbers);

// Undoes a run if it fails on the device, later. Keeps what would be given back alive.
pjrt::InFlight::Listener undo_on_failure(std::shared_ptr<std::vector<Replaced>> replaced,
                                         c10::DeviceIndex device);

// Launches a run with what undoes it later. If that throws, the run has it back.
template <typename Launch>
auto undoable(const Run& run, c10::DeviceIndex device, Launch launch) {
  if (run.replaced.empty()) return launch(pjrt::InFlight::Listener());
  auto replaced = std::make_shared<std::vector<Replaced>>(std::move(run.replaced));
  try {
    return launch(undo_on_failure(replaced, device));
  } catch (...) {
    run.replaced = std::move(*replaced);
    throw;
  }
}

// Waits until the device has done what was enqueued, and what was sent to it has arrived. Execution
// errors surface.
void wait_for(c10::DeviceIndex device);

// The device's end of the runtime; throws if there is no such device.
const pjrt::Device& pjrt_device(c10::DeviceIndex device);

// Out of device memory is torch.OutOfMemoryError, as for any accelerator. The message lists what
// takes most memory, if the device is known. Of a matrix outside an operator's domain it is
// torch.linalg.LinAlgError.
[[noreturn]] void rethrow(const pjrt::Error& error, const std::string& doing,
                          std::optional<c10::DeviceIndex> device = std::nullopt);

// Functions that describe the user's tensors in messages; each takes the GIL itself. Set once, by
// the bindings.
struct TensorDescriptions {
  // Their names, by their memory's addresses: "0.weight, 0.bias".
  std::function<std::string(const std::vector<const void*>&)> names;
  // A line for each of those that take most of a device's memory.
  std::function<std::string(c10::DeviceIndex)> largest;
};
void set_tensor_descriptions(TensorDescriptions descriptions);

}  // namespace lazyxla::graph
