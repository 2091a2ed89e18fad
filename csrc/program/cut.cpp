#include "program/cut.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>

namespace lazyxla::graph {
namespace {

// A smaller graph is compiled in tens of milliseconds.
constexpr size_t kSmall = 16;
// How much of the middle may be moved with a node that differs: at most kTakenAlong nodes, and at
// most one in kPartTakenAlong of all nodes.
constexpr size_t kTakenAlong = 16, kPartTakenAlong = 8;

// The position of the node that makes each value, or -1 for a leaf.
std::vector<int32_t> makers(const Graph& graph) {
  std::vector<int32_t> makers(graph.leaves.size(), -1);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    makers.insert(makers.end(), graph.nodes[i]->spec()->outputs.size(), static_cast<int32_t>(i));
  }
  return makers;
}

// Moves a node and all of the middle that it depends on before the middle; not if that is much.
bool move_before(size_t node, const Wiring& wiring, std::vector<uint32_t>& stages) {
  const size_t most = std::min(kTakenAlong, wiring.size() / kPartTakenAlong);
  std::vector<size_t> moved{node};
  for (size_t i = 0; i < moved.size(); ++i) {
    for (int32_t operand : wiring.operands(moved[i])) {
      if (operand < 0 || stages[operand] == kBefore) continue;
      if (std::find(moved.begin(), moved.end(), operand) != moved.end()) continue;
      if (moved.size() > most) return false;
      moved.push_back(operand);
    }
  }
  for (size_t each : moved) stages[each] = kBefore;
  return true;
}

// The nodes that differ on which a node that does not differ depends, directly or not.
std::vector<bool> needed_by_others(const Wiring& wiring, const std::vector<bool>& differs) {
  std::vector<bool> needed(wiring.size(), false);
  for (size_t i = wiring.size(); i-- > 0;) {
    if (differs[i] && !needed[i]) continue;
    for (int32_t operand : wiring.operands(i)) {
      if (operand >= 0) needed[operand] = true;
    }
  }
  return needed;
}

// Numbers one stage as the walk numbers a graph.
class Numbering {
 public:
  Numbering(const Graph& whole, const Wiring& wiring, const std::vector<int32_t>& makers,
            const std::vector<uint32_t>& stages, uint32_t stage)
      : whole_(whole), wiring_(wiring), makers_(makers), stages_(stages), stage_(stage) {
    size_t slot = 0;
    for (const ir::NodePtr& node : whole.nodes) {
      slots_.push_back(slot);
      slot += node->slots().size();
    }
  }

  Piece run(std::vector<uint32_t> outputs) {
    Graph& graph = piece_.graph;
    graph.key.push_back(whole_.key[0]);
    for (uint32_t output : outputs) visit(makers_[output]);
    graph.number_values();
    for (uint32_t output : outputs) {
      const int32_t maker = makers_[output];
      graph.outputs.push_back(graph.values[places_[maker]] + output - whole_.values[maker]);
    }
    piece_.outputs = std::move(outputs);
    for (uint32_t input : piece_.inputs) graph.aliases.push_back(alias_of(input));
    graph.complete_key();
    return std::move(piece_);
  }

 private:
  void visit(size_t root) {
    if (is_met(root)) return;
    std::vector<std::pair<size_t, size_t>> stack{{root, 0}};
    while (!stack.empty()) {
      auto& [node, next] = stack.back();
      if (next == wiring_.operands(node).size()) {
        add(node);
        stack.pop_back();
        continue;
      }
      const uint32_t operand = whole_.operand(node, next++);
      if (!is_made_here(operand)) {
        add_leaf(operand);
      } else if (!is_met(makers_[operand])) {
        stack.emplace_back(makers_[operand], 0);
      }
    }
  }

  bool is_met(size_t node) const { return places_.count(node) != 0; }
  bool is_made_here(uint32_t value) const {
    return makers_[value] >= 0 && stages_[makers_[value]] == stage_;
  }

  void add_leaf(uint32_t value) {
    if (leaves_.count(value)) return;
    if (makers_[value] < 0) {
      leaves_[value] = piece_.graph.add_leaf(whole_.leaves[value]);
    } else {
      const ir::NodePtr& maker = whole_.nodes[makers_[value]];
      const uint32_t index = value - whole_.values[makers_[value]];
      leaves_[value] =
          piece_.graph.add_leaf(ir::Node::make_leaf(maker->output_type(index), nullptr));
    }
    piece_.inputs.push_back(value);
  }

  void add(size_t node) {
    const ir::NodePtr& pointer = whole_.nodes[node];
    places_[node] = piece_.graph.add_node(pointer);
    for (size_t i = 0; i < wiring_.operands(node).size(); ++i) {
      const uint32_t operand = whole_.operand(node, i);
      const int32_t maker = makers_[operand];
      if (is_made_here(operand)) {
        piece_.graph.add_operand(places_[maker], operand - whole_.values[maker], false);
      } else {
        piece_.graph.add_operand(leaves_[operand], 0, true);
      }
    }
    for (size_t i = 0; i < pointer->slots().size(); ++i) piece_.slots.push_back(slots_[node] + i);
  }

  // The output of the piece that may take an input's memory over.
  int alias_of(uint32_t input) const {
    if (makers_[input] >= 0 || whole_.aliases[input] < 0) return -1;
    const auto& outputs = piece_.outputs;
    const auto found =
        std::find(outputs.begin(), outputs.end(), whole_.outputs[whole_.aliases[input]]);
    return found == outputs.end() ? -1 : static_cast<int>(found - outputs.begin());
  }

  const Graph& whole_;
  const Wiring& wiring_;
  const std::vector<int32_t>& makers_;
  const std::vector<uint32_t>& stages_;
  const uint32_t stage_;
  std::vector<uint32_t> slots_;                           // where each node's begin in the whole
  ska::flat_hash_map<size_t, uint32_t> places_, leaves_;  // of nodes and values, in the piece
  Piece piece_;
};

}  // namespace

Wiring::Wiring(const Graph& graph) {
  const std::vector<int32_t> maker = makers(graph);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (size_t j = 0; j < graph.nodes[i]->operands().size(); ++j) {
      operands_.push_back(maker[graph.operand(i, j)]);
    }
    begins_.push_back(operands_.size());
  }
}

std::vector<uint32_t> find_stages(const Graph& graph, const Wiring& wiring,
                                  const std::vector<bool>& differs, double least) {
  const std::vector<bool> needed = needed_by_others(wiring, differs);
  std::vector<uint32_t> stages(wiring.size(), kMiddle);
  for (size_t i = 0; i < stages.size(); ++i) {
    const auto operands = wiring.operands(i);
    const bool is_after = std::any_of(operands.begin(), operands.end(), [&](int32_t operand) {
      return operand >= 0 && stages[operand] == kAfter;
    });
    if (is_after || (differs[i] && !(needed[i] && move_before(i, wiring, stages)))) {
      stages[i] = kAfter;
    }
  }
  size_t all = 0, middle = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const size_t operators = graph.nodes[i]->spec()->operators;
    all += operators;
    if (stages[i] == kMiddle) middle += operators;
  }
  if (all < kSmall || middle == all || static_cast<double>(middle) < least * all) return {};
  return stages;
}

std::vector<Piece> cut(const Graph& graph, const std::vector<uint32_t>& stages) {
  const Wiring wiring(graph);
  const std::vector<int32_t> maker = makers(graph);
  std::vector<bool> is_output(maker.size(), false);
  std::vector<std::vector<uint32_t>> outputs(*std::max_element(stages.begin(), stages.end()) + 1);
  const auto stage_of = [&](uint32_t value) { return stages[maker[value]]; };
  const auto add_output = [&](uint32_t value) {
    if (is_output[value]) return;
    is_output[value] = true;
    outputs[stage_of(value)].push_back(value);
  };
  for (uint32_t output : graph.outputs) add_output(output);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (size_t j = 0; j < wiring.operands(i).size(); ++j) {
      const uint32_t operand = graph.operand(i, j);
      if (maker[operand] >= 0 && stage_of(operand) != stages[i]) add_output(operand);
    }
  }
  std::vector<Piece> pieces;
  for (uint32_t stage = 0; stage < outputs.size(); ++stage) {
    if (outputs[stage].empty()) continue;
    Numbering numbering(graph, wiring, maker, stages, stage);
    pieces.push_back(numbering.run(std::move(outputs[stage])));
  }
  return pieces;
}

}  // namespace lazyxla::graph
