// Host programs: graphs that PyTorch's kernels compute, where the device is the host.
//
// XLA's compiler takes 10 ms and more for one operator, PyTorch's CPU kernels, on the memory of the
// device's buffers, microseconds. So there are graphs that are not worth compiling:
//
// - A small one that is new in every iteration of a loop, such as a cat that grows, and would never
//   run its program twice. Once some of the same operators were compiled, further ones are not.
// - In inference, any that is not large and does not recur often: a prompt's first pass, the first
//   step of a sampler. The host does the first runs of each (Trial). Training is compiled at once:
//   its step is sure to recur, and two runs of it should not differ in rounding.
// - The rounds of a loop that has no sync in it (cut.h), likewise, and the operators before and
//   after them.
//
// Such a run waits for its inputs. If they are not computed yet, the runner's thread runs it
// (graph/runner.h).
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "pjrt/buffer.h"
#include "program/graph.h"

namespace lazyxla::program {

struct HostProgram {
  // Computes the results from the inputs, all of them dense memory of the host, and from the values
  // of the graph's slots.
  std::function<void(c10::ArrayRef<const void*> inputs, c10::ArrayRef<ir::ScalarValue> slots,
                     c10::ArrayRef<void*> results)>
      compute;
  std::vector<ir::TensorType> results;
};

// Which graphs the host may run.
enum class OnHost : uint8_t {
  kNone,
  kSmall,      // a small one that is new each time
  kStage,      // a small one: it is a stage of a graph that was cut, which differs each time
  kFirstRuns,  // as kSmall, and the first runs of any that is not large
  kMedium,     // any that is not large
};

// Makes the host's program of a graph; nothing if it has an operator that only XLA computes right.
// Set once, by the dispatch room. Called on workers only.
using HostProgramMaker = std::function<std::optional<HostProgram>(const Graph&)>;
void set_host_program_maker(HostProgramMaker maker);

// Whether the settings, and the platform, leave graphs to the host.
bool may_have_host_programs();

// The host's program of a graph that was never run, if it is not worth compiling. To be asked once
// for each graph: it counts them.
std::optional<HostProgram> find_host_program(const Graph& graph, OnHost which);

// That of a graph whose first runs the host is to do, if it can.
std::optional<HostProgram> find_trial_program(const Graph& graph);

// Waits for the inputs, and copies those that are not in the host's memory.
std::vector<pjrt::Buffer> run(const HostProgram& program, c10::ArrayRef<pjrt::Buffer*> inputs,
                              c10::ArrayRef<ir::ScalarValue> slots, const pjrt::Device& device);

}  // namespace lazyxla::program
