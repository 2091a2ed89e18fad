#include "program/scalars.h"

#include <c10/util/flat_hash_map.h>

#include <map>

#include "common/options.h"
#include "program/partition.h"
#include "program/replicas.h"

namespace lazyxla::program {

bool ScalarPlan::serves(c10::ArrayRef<ir::ScalarValue> slots) const {
  for (size_t i = 0; i < slots.size(); ++i) {
    if (differs(i, slots) && !variable[i]) return false;
  }
  return true;
}

void ScalarPlan::fix(c10::ArrayRef<uint32_t> static_slots) {
  for (uint32_t slot : static_slots) variable[slot] = false;
}

std::vector<ir::SlotKind> slot_kinds(const Graph& graph) {
  std::vector<ir::SlotKind> kinds;
  kinds.reserve(graph.slots.size());
  for (const ir::NodePtr& node : graph.nodes) {
    for (const ir::SlotSpec& slot : node->spec()->slots) kinds.push_back(slot.kind);
  }
  return kinds;
}

namespace {

// Whether it is an optional factor that changes nothing, as alpha in add(x, y, alpha=1): such a
// call was written without it.
bool is_left_out(const ir::SlotSpec& slot, const ir::ScalarValue& value) {
  return slot.optional && (slot.kind == ir::SlotKind::kFloat ? value.f == 1 : value.i == 1);
}

// Per slot, whether its operator expects it to vary. A bool is a flag, which changes sooner or
// later.
std::vector<bool> expected_to_vary(const Graph& graph) {
  std::vector<bool> expected;
  expected.reserve(graph.slots.size());
  for (const ir::NodePtr& node : graph.nodes) {
    const ir::OpSpec& spec = *node->spec();
    for (size_t i = 0; i < spec.slots.size(); ++i) {
      const ir::SlotSpec& slot = spec.slots[i];
      const bool is_flag = slot.dtype == c10::ScalarType::Bool;
      expected.push_back(is_flag || (spec.numbers_vary && !is_left_out(slot, node->slots()[i])));
    }
  }
  return expected;
}

// Per slot, whether it varies, or the same slot of another operator of the same kind does: most
// often that is the same line in another turn of a loop, whose number is another one next time.
std::vector<bool> varies_in_kind(const Graph& graph, const ScalarPlan& last) {
  std::vector<bool> result(graph.slots.size(), false);
  std::vector<uint64_t> kinds;  // per slot
  ska::flat_hash_set<uint64_t> varying;
  for (const ir::NodePtr& node : graph.nodes) {
    for (size_t i = 0; i < node->slots().size(); ++i) {
      const size_t slot = kinds.size();
      kinds.push_back(node->spec()->id << 8 | i);
      result[slot] = last.varies(slot, graph.slots);
      if (result[slot]) varying.insert(kinds.back());
    }
  }
  size_t slot = 0;
  for (const ir::NodePtr& node : graph.nodes) {
    for (size_t i = 0; i < node->slots().size(); ++i, ++slot) {
      const bool is_in_kind = varying.count(kinds[slot]) > 0;
      if (is_in_kind && !is_left_out(node->spec()->slots[i], node->slots()[i])) result[slot] = true;
    }
  }
  return result;
}

}  // namespace

ScalarHistory& ScalarHistory::of(const Graph& graph) {
  struct Shared {
    std::map<const ir::Mesh*, ScalarHistory> by_mesh;
    std::map<std::string, ScalarHistory> by_replicas;
  };
  static auto* own = new ScalarHistory();
  static auto* shared = new Guarded<Shared>();
  const bool spans = graph.partition && graph.partition->spans_processes();
  if (!spans && !graph.replicas) return *own;
  const auto all = shared->hold();
  return spans ? all->by_mesh[graph.partition->mesh]
               : all->by_replicas[graph.replicas->devices_text()];
}

std::vector<bool> ScalarHistory::variable_slots(const Graph& graph, const ScalarPlan* last) {
  std::vector<bool> result(graph.slots.size(), false);
  presume(graph, result);
  const std::vector<ir::SlotKind> kinds = slot_kinds(graph);
  const std::vector<bool> expected = expected_to_vary(graph);
  // What varied once, or varies now, is an input from here on.
  std::vector<bool> varies(kinds.size(), false);
  if (last) varies = varies_in_kind(graph, *last);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == ir::SlotKind::kRandom || expected[i] || varies[i]) result[i] = true;
  }
  return result;
}

void ScalarHistory::presume(const Graph& graph, std::vector<bool>& variable) {
  const auto all = past_.hold();
  const auto capacity = static_cast<size_t>(options().max_calls.load());
  ska::flat_hash_map<uint64_t, size_t> occurrences;
  size_t slot = 0;
  for (const ir::NodePtr& node : graph.nodes) {
    auto values = node->slots();
    if (values.empty()) continue;
    const uint64_t id = node->spec()->id;
    auto* known = all->find(id);
    auto& past = known ? *known : all->insert(id, {}, capacity);
    size_t index = occurrences[id]++;
    if (index >= past.size()) past.resize(index + 1, {values.begin(), values.end()});
    for (size_t i = 0; i < values.size(); ++i, ++slot) {
      const bool is_index = node->spec()->slots[i].kind == ir::SlotKind::kIndex;
      if (!is_index && past[index][i].i != values[i].i) variable[slot] = true;
    }
    past[index].assign(values.begin(), values.end());
  }
}

}  // namespace lazyxla::program
