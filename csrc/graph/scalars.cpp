#include "graph/scalars.h"

namespace lazyxla::graph {

std::vector<ir::SlotKind> slot_kinds(const Graph& graph) {
  std::vector<ir::SlotKind> kinds;
  kinds.reserve(graph.slots.size());
  for (const ir::NodePtr& node : graph.nodes) {
    for (const ir::SlotSpec& slot : node->spec()->slots) kinds.push_back(slot.kind);
  }
  return kinds;
}

ScalarHistory& ScalarHistory::get() {
  static auto* instance = new ScalarHistory();
  return *instance;
}

std::vector<bool> ScalarHistory::variable_slots(const Graph& graph,
                                                const std::vector<bool>* variable,
                                                const std::vector<ir::ScalarValue>* constants) {
  std::vector<bool> result(graph.slots.size(), false);
  presume(graph, result);
  const std::vector<ir::SlotKind> kinds = slot_kinds(graph);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == ir::SlotKind::kRandom) result[i] = true;
    // What varied once, or varies now, is an input from here on.
    if (variable && ((*variable)[i] || (*constants)[i].i != graph.slots[i].i)) result[i] = true;
  }
  return result;
}

void ScalarHistory::presume(const Graph& graph, std::vector<bool>& variable) {
  std::lock_guard lock(mutex_);
  ska::flat_hash_map<uint64_t, size_t> occurrences;
  size_t slot = 0;
  for (const ir::NodePtr& node : graph.nodes) {
    auto values = node->slots();
    if (values.empty()) continue;
    auto& past = past_[node->spec()->id];
    size_t place = occurrences[node->spec()->id]++;
    if (place == past.size()) past.emplace_back(values.begin(), values.end());
    for (size_t i = 0; i < values.size(); ++i, ++slot) {
      if (past[place][i].i != values[i].i) variable[slot] = true;
    }
    past[place].assign(values.begin(), values.end());
  }
}

}  // namespace lazyxla::graph
