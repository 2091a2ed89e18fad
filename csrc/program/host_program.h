// Host programs: graphs that PyTorch's kernels compute, where the device is the host.
//
// XLA's compiler takes 10 ms and more for one operator, PyTorch's CPU kernels, on the memory of the
// device's buffers, microseconds. So there are graphs that are not worth compiling:
//
// - In inference, any that is not large and does not recur often: a prompt's first pass, the first
//   step of a sampler. The host does the first runs of each (Trial).
// - In training, those of a line whose graphs have not recurred (recurrence.h), likewise. The
//   others are compiled at once: a step is sure to recur, and two runs of it should not differ in
//   rounding.
// - In eager mode, any operator that is not large and has not run often, in training, too.
// - The rounds of a loop that has no sync in it (cut.h), likewise, and the operators before and
//   after them.
// - A small stage of a graph that is cut since it differs from those before.
//
// Such a run waits for its inputs. If they are not computed yet, the runner's thread runs it
// (graph/runner.h).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "pjrt/buffer.h"
#include "program/graph.h"

namespace lazyxla::program {

// Memory of the host, which is freed with its owner.
struct OwnedMemory {
  void* data;
  std::shared_ptr<void> owner;
};

struct HostProgram {
  // Computes the results from the inputs, all of them dense memory of the host, and from the values
  // of the graph's slots. No result's memory is also another's, or an input's.
  std::function<std::vector<OwnedMemory>(c10::ArrayRef<const void*> inputs,
                                         c10::ArrayRef<ir::ScalarValue> slots)>
      compute;
  std::vector<ir::TensorType> results;
};

// Which graphs the host may run.
enum class OnHost : uint8_t {
  kNone,
  kStage,        // a small one
  kTraining,     // none, unless its line's graphs do not recur; then as kNewEachTime
  kFirstRuns,    // the first runs of one that is not large
  kOneOperator,  // the same of an operator alone: each layer of one step may run it
  kNewEachTime,  // the first runs of any, also as stages
  kMedium,       // one that is not large
};

inline bool is_tried(OnHost which) {
  return which == OnHost::kFirstRuns || which == OnHost::kOneOperator ||
         which == OnHost::kNewEachTime;
}

// Set once, by the dispatch room. Called on workers only.
struct HostProgramMaker {
  // The host's program of a graph; nothing if it has an operator that only XLA computes right.
  std::function<std::optional<HostProgram>(const Graph&)> make;
  // Whether a node is no such operator, as far as can be told without calling it.
  std::function<bool(const ir::Node&)> computes;
};
void set_host_program_maker(HostProgramMaker maker);

// Whether the settings, and the platform, leave graphs to the host.
bool may_have_host_programs();

// The host's program of a graph that is never to be compiled.
std::optional<HostProgram> find_host_program(const Graph& graph, OnHost which);

// Whether the host does the first runs of such a graph.
bool may_be_tried(const Graph& graph, OnHost which);
// Its program, if the host can compute all of it.
std::optional<HostProgram> find_trial_program(const Graph& graph);
// Else a cut (cut.h): in each even stage, an operator that the host cannot compute is a stage of
// its own, which other graphs share; unless there are too many for it to pay.
std::vector<uint32_t> stages_on_host(const Graph& graph, const std::vector<uint32_t>& stages);
// Whether a graph is not large.
bool is_medium(const Graph& graph);

// Waits for the inputs, and copies those that are not in the host's memory.
std::vector<pjrt::Buffer> run(const HostProgram& program, c10::ArrayRef<pjrt::Buffer*> inputs,
                              c10::ArrayRef<ir::ScalarValue> slots, const pjrt::Device& device);

}  // namespace lazyxla::program
