#include "program/host_program.h"

#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>

#include "common/bounded_map.h"
#include "common/counters.h"
#include "common/locks.h"
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

// How many graphs of the same operators are compiled first: most loops settle before, and one that
// does not is reported to the user (recompilations.py). An estimate, too.
constexpr int kCompiledFirst = 8;

constexpr size_t kMostFamilies = 1024;

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

bool is_medium(const Graph& graph) { return elements_of(graph) <= kMostElementsOfMedium; }

// The number of earlier graphs of the same operators, in this order.
int graphs_before(const Graph& graph) {
  static auto* all = new Guarded<BoundedMap<size_t, int>>();
  size_t family = graph.nodes.size();
  for (const ir::NodePtr& node : graph.nodes) {
    family = c10::hash_combine(family, std::hash<std::string>()(node->spec()->name));
  }
  const auto counts = all->hold();
  int* count = counts->find(family);
  if (!count) count = &counts->insert(family, 0, kMostFamilies);
  return (*count)++;
}

using Memory = std::vector<std::max_align_t>;
Memory memory_for(size_t nbytes) { return Memory(nbytes / sizeof(std::max_align_t) + 1); }

}  // namespace

void set_host_program_maker(HostProgramMaker new_maker) { maker = std::move(new_maker); }

bool may_have_host_programs() {
  return options().host_programs && !options().strict_host_calls &&
         pjrt::Runtime::get().platform() == "cpu";
}

std::optional<HostProgram> find_host_program(const Graph& graph, OnHost which) {
  if (which == OnHost::kNone || !may_have_host_programs()) return std::nullopt;
  if (which == OnHost::kMedium) return is_medium(graph) ? maker(graph) : std::nullopt;
  if (!is_small(graph)) return std::nullopt;
  if (which != OnHost::kStage && graphs_before(graph) < kCompiledFirst) return std::nullopt;
  return maker(graph);
}

std::optional<HostProgram> find_trial_program(const Graph& graph) {
  return may_have_host_programs() && is_medium(graph) ? maker(graph) : std::nullopt;
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
  std::vector<Memory> memory;
  c10::SmallVector<void*, 8> results;
  for (const ir::TensorType& type : program.results) {
    memory.push_back(memory_for(type.nbytes()));
    results.push_back(memory.back().data());
  }
  program.compute(data, slots, results);
  std::vector<pjrt::Buffer> buffers;
  for (size_t i = 0; i < results.size(); ++i) {
    const ir::TensorType& type = program.results[i];
    const std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
    buffers.push_back(pjrt::Runtime::get().client().buffer_from_host(
        results[i], pjrt_type(type.dtype), dims, {}, device));
  }
  return buffers;
}

}  // namespace lazyxla::program
