#include "graph/tape.h"

#include <c10/util/Exception.h>

namespace lazyxla::graph {

void Tape::start() {
  TORCH_CHECK(!current_, "lazyxla: a step is being captured on this thread");
  current_ = this;
}

void Tape::stop() {
  if (current_ == this) current_ = nullptr;
}

void Tape::take(const program::Graph& graph, const program::VariantRef& found) {
  if (++flushes > 1) return;
  variant = found;
  if (found->runs_on_host() || !found->stages.empty()) {
    problem = "its graph was cut, or is run by PyTorch's kernels";
  }
  for (const ir::NodePtr& node : graph.nodes) {
    if (node->spec()->collective) problem = "it communicates with other processes";
  }
  if (!problem.empty()) return;
  for (const ir::NodePtr& leaf : graph.leaves) {
    leaves.push_back(leaf.get());
    leaf_types.push_back(leaf->output_type(0));
    leaf_shardings.push_back(program::buffer_of(*leaf.get()).sharding());
  }
  output_types = graph.output_types;
  aliases = graph.aliases;
  slots = graph.slots;
  for (const program::Taken& taken : graph.taken) {
    written.push_back({taken.id, taken.output, taken.sharding});
  }
  take_draws(graph);
}

void Tape::take_draws(const program::Graph& graph) {
  if (graph.draws.size() > 1) {
    problem = "it draws random numbers from more than one generator, or sets a seed";
    return;
  }
  const ir::Draws* drawn = graph.draws.empty() ? nullptr : &graph.draws.front();
  if (drawn) {
    generator = drawn->generator;
    draws = drawn->next - drawn->first;
  }
  uint32_t position = 0;
  for (const ir::NodePtr& node : graph.nodes) {
    const std::vector<ir::SlotSpec>& specs = node->spec()->slots;
    if (node->spec()->random) {
      const auto seed = static_cast<uint32_t>(position + specs.size() - 2);
      const auto ordinal = static_cast<uint64_t>(slots[seed + 1].i);
      if (!drawn || static_cast<uint64_t>(slots[seed].i) != drawn->seed || ordinal < drawn->first ||
          ordinal >= drawn->next) {
        problem = "it uses random numbers that were drawn before it";
        return;
      }
      random.push_back({seed, seed + 1, ordinal - drawn->first});
    }
    position += static_cast<uint32_t>(specs.size());
  }
}

}  // namespace lazyxla::graph
