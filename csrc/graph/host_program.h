// Host programs: small graphs that PyTorch's kernels compute, where the device is the host.
//
// XLA's compiler takes 10 ms and more for one operator. A small graph that is new in every turn of
// a loop, such as a cat that grows, would pay that each time, and never run its program twice. So
// once some graphs of the same operators were compiled, further ones are not: PyTorch's CPU kernels
// compute them, on the memory of the device's buffers, within microseconds for each operator.
//
// Such a run waits for its inputs. If they are not there yet, the thread does it that runs what is
// left (runner.h).
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "graph/walk.h"
#include "pjrt/buffer.h"

namespace lazyxla::graph {

struct HostProgram {
  // Computes the results from the inputs, all of them dense memory of the host, and from the values
  // of the graph's slots.
  std::function<void(c10::ArrayRef<const void*> inputs, c10::ArrayRef<ir::ScalarValue> slots,
                     c10::ArrayRef<void*> results)>
      compute;
  std::vector<ir::TensorType> results;
};

// Makes the host's program of a graph; nothing if it has an operator that only XLA computes right.
// Set once, by the dispatch room. Called on workers only.
using HostProgramMaker = std::function<std::optional<HostProgram>(const Graph&)>;
void set_host_program_maker(HostProgramMaker maker);

// The host's program of a graph that was never run, if it is small and not worth compiling: there
// were many of the same operators, or it is a stage of a graph that was cut (cut.h), whose sizes or
// operators differ each time. To be asked once for each graph: it counts them.
std::optional<HostProgram> find_host_program(const Graph& graph, bool is_stage);

// Waits for the inputs.
std::vector<pjrt::Buffer> run(const HostProgram& program, c10::ArrayRef<pjrt::Buffer*> inputs,
                              c10::ArrayRef<ir::ScalarValue> slots, const pjrt::Device& device);

}  // namespace lazyxla::graph
