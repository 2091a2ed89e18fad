// Host programs: small graphs that PyTorch's kernels compute, where the device is the host.
//
// XLA's compiler takes 10 ms and more for one operator. A small graph that is new in every turn of
// a loop, such as a cat that grows, would pay that each time, and never run its program twice. So
// once some graphs of the same operators were compiled, further ones are not: PyTorch's CPU kernels
// compute them, on the memory of the device's buffers, within microseconds for each operator.
//
// Such a run waits for its inputs; the thread that runs what is left (runner.h) does it.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "graph/walk.h"
#include "pjrt/buffer.h"

namespace lazyxla::graph {

struct HostProgram {
  // Computes the results from the inputs, all of them dense memory of the host, and from the values
  // of the graph's slots. Takes the GIL itself.
  std::function<void(c10::ArrayRef<const void*> inputs, c10::ArrayRef<ir::ScalarValue> slots,
                     c10::ArrayRef<void*> results)>
      compute;
  std::vector<ir::TensorType> results;
};

// Makes the host's program of a graph; nothing if it has an operator that only XLA computes right.
// Set once, by the bindings; takes the GIL itself. Called on workers only.
using HostProgramMaker = std::function<std::optional<HostProgram>(const Graph&)>;
void set_host_program_maker(HostProgramMaker maker);

// The host's program of a graph that was never run, if it is small and there were so many of the
// same operators that it is not worth compiling. To be asked once for each graph: it counts them.
std::optional<HostProgram> find_host_program(const Graph& graph);

// Waits for the inputs.
std::vector<pjrt::Buffer> run(const HostProgram& program, c10::ArrayRef<pjrt::Buffer*> inputs,
                              c10::ArrayRef<ir::ScalarValue> slots, const pjrt::Device& device);

}  // namespace lazyxla::graph
