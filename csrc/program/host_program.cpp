#include "program/host_program.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "common/counters.h"
#include "common/options.h"
#include "pjrt/client.h"
#include "pjrt/host_view.h"
#include "pjrt/runtime.h"
#include "program/buffer.h"

namespace lazyxla::program {
namespace {

// Larger graphs are compiled: an estimate of where that begins to pay, not measured.
constexpr size_t kMostNodes = 16;
constexpr int64_t kMostElements = int64_t{1} << 14;

// A larger graph runs for so long that it may as well be compiled for its first run: with PyTorch's
// kernels a model of this size takes tens of milliseconds.
constexpr int64_t kMostElementsOfMedium = int64_t{1} << 23;

// Where graphs do not recur, their compilation is lost at any size; but the host's program has the
// old values and the new ones at the same time (it consumes no input). A GiB of float32.
constexpr int64_t kMostElementsOfLarge = int64_t{1} << 28;

// An operator alone is compiled in some 15 ms, a graph in one to ten for each operator. A graph
// with fewer operators for each one that has to be compiled is compiled whole.
constexpr size_t kLeastForEach = 8;

auto& maker = *new HostProgramMaker();

// Of all its values.
int64_t elements_of(const Graph& graph) {
  int64_t elements = 0;
  auto add = [&](const ir::TensorType& type) {
    elements += std::max<int64_t>(c10::multiply_integers(type.dims), 1);
  };
  for (const ir::NodePtr& leaf : graph.leaves) add(leaf->output_type(0));
  for (const ir::NodePtr& node : graph.nodes) {
    for (const ir::TensorType& type : node->spec()->outputs) add(type);
  }
  return elements;
}

bool is_small(const Graph& graph) {
  return graph.nodes.size() <= kMostNodes && elements_of(graph) <= kMostElements;
}

using Memory = std::vector<std::max_align_t>;
Memory memory_for(size_t nbytes) { return Memory(nbytes / sizeof(std::max_align_t) + 1); }

}  // namespace

void set_host_program_maker(HostProgramMaker new_maker) { maker = std::move(new_maker); }

bool is_medium(const Graph& graph) { return elements_of(graph) <= kMostElementsOfMedium; }

bool may_have_host_programs() {
  return options().host_programs && !options().strict_host_calls &&
         pjrt::Runtime::get().platform() == "cpu";
}

std::optional<HostProgram> find_host_program(const Graph& graph, OnHost which) {
  const bool is_wanted = (which == OnHost::kMedium && is_medium(graph)) ||
                         (which == OnHost::kStage && is_small(graph));
  return is_wanted && may_have_host_programs() ? maker.make(graph) : std::nullopt;
}

bool may_be_tried(const Graph& graph, OnHost which) {
  if (!is_tried(which) || !may_have_host_programs()) return false;
  const bool may_be_large = which == OnHost::kNewEachTime;
  return elements_of(graph) <= (may_be_large ? kMostElementsOfLarge : kMostElementsOfMedium);
}

std::optional<HostProgram> find_trial_program(const Graph& graph) { return maker.make(graph); }

std::vector<uint32_t> stages_on_host(const Graph& graph, const std::vector<uint32_t>& stages) {
  struct Stage {
    uint32_t nodes = 0, compiled = 0, first = 0;
  };
  std::vector<Stage> all(*std::max_element(stages.begin(), stages.end()) + 1);
  std::vector<uint32_t> parts;  // of the nodes' stages
  for (size_t i = 0; i < stages.size(); ++i) {
    Stage& stage = all[stages[i]];
    const bool on_host = stages[i] % 2 == 1 || maker.computes(*graph.nodes[i].get());
    ++stage.nodes;
    parts.push_back(2 * stage.compiled + (on_host ? 0 : 1));
    if (!on_host) ++stage.compiled;
  }
  uint32_t next = 0;
  for (Stage& stage : all) {
    if (stage.compiled * kLeastForEach > stage.nodes) stage.compiled = 0;
    stage.first = next;
    next += 2 * stage.compiled + 1;
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    const Stage& stage = all[stages[i]];
    parts[i] = stage.first + (stage.compiled ? parts[i] : 0);
  }
  return parts;
}

std::vector<pjrt::Buffer> run(const HostProgram& program, c10::ArrayRef<pjrt::Buffer*> inputs,
                              c10::ArrayRef<ir::ScalarValue> slots, const pjrt::Device& device) {
  ++Counters::get().host_programs;
  std::vector<pjrt::HostView> views;
  std::vector<Memory> copies;  // of data on another device, or in another layout
  c10::SmallVector<const void*, 8> data;
  for (const pjrt::Buffer* input : inputs) {
    if (auto view = pjrt::HostView::of(*input)) {
      data.push_back(view->data());
      views.push_back(std::move(*view));
      continue;
    }
    copies.push_back(memory_for(input->nbytes()));
    input->to_host(copies.back().data(), input->nbytes());
    data.push_back(copies.back().data());
  }
  std::vector<OwnedMemory> results = program.compute(data, slots);
  std::vector<pjrt::Buffer> buffers;
  for (size_t i = 0; i < results.size(); ++i) {
    const ir::TensorType& type = program.results[i];
    const std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
    const void* result = results[i].data;
    buffers.push_back(pjrt::Runtime::get().client().buffer_from_lasting_memory(
        PJRT_HostBufferSemantics_kMutableZeroCopy, result, pjrt_type(type.dtype), dims, device,
        [owner = std::move(results[i].owner)]() mutable { owner = nullptr; }));
  }
  return buffers;
}

}  // namespace lazyxla::program
