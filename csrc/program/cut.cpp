#include "program/cut.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>

namespace lazyxla::program {
namespace {

// The position of the node that makes each value, or -1 for a leaf.
std::vector<int32_t> makers(const Graph& graph) {
  std::vector<int32_t> makers(graph.leaves.size(), -1);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    makers.insert(makers.end(), graph.nodes[i]->spec()->outputs.size(), static_cast<int32_t>(i));
  }
  return makers;
}

// The value that each is the old content of, for the same storage: it may take the memory over. -1
// if there is none. As in find_aliases (graph/walk.cpp), if the old content were a leaf.
std::vector<int64_t> successors(const Graph& graph, size_t values) {
  std::vector<int64_t> successors(values, -1);
  std::vector<bool> taken(values, false);
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    if (graph.aliases[i] < 0) continue;
    successors[i] = graph.outputs[graph.aliases[i]];
    taken[successors[i]] = true;
  }
  for (const auto& [value, output] : graph.made_first()) {
    if (value == output || taken[output]) continue;
    successors[value] = output;
    taken[output] = true;
  }
  return successors;
}

// Numbers one stage as the walk numbers a graph.
class Numbering {
 public:
  Numbering(const Graph& whole, const std::vector<int32_t>& makers,
            const std::vector<int64_t>& successors, const std::vector<uint32_t>& stages,
            uint32_t stage)
      : whole_(whole), makers_(makers), successors_(successors), stages_(stages), stage_(stage) {
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
      graph.outputs.push_back(graph.values[positions_[maker]] + output - whole_.values[maker]);
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
      if (next == whole_.nodes[node]->operands().size()) {
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

  bool is_met(size_t node) const { return positions_.count(node) != 0; }
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
    positions_[node] = piece_.graph.add_node(pointer);
    for (size_t i = 0; i < pointer->operands().size(); ++i) {
      const uint32_t operand = whole_.operand(node, i);
      const int32_t maker = makers_[operand];
      if (is_made_here(operand)) {
        piece_.graph.add_operand(positions_[maker], operand - whole_.values[maker], false);
      } else {
        piece_.graph.add_operand(leaves_[operand], 0, true);
      }
    }
    for (size_t i = 0; i < pointer->slots().size(); ++i) piece_.slots.push_back(slots_[node] + i);
  }

  // The output of the piece that may take an input's memory over.
  int alias_of(uint32_t input) const {
    const auto& outputs = piece_.outputs;
    const auto found = std::find(outputs.begin(), outputs.end(), successors_[input]);
    return found == outputs.end() ? -1 : static_cast<int>(found - outputs.begin());
  }

  const Graph& whole_;
  const std::vector<int32_t>& makers_;
  const std::vector<int64_t>& successors_;
  const std::vector<uint32_t>& stages_;
  const uint32_t stage_;
  std::vector<uint32_t> slots_;                              // where each node's begin in the whole
  ska::flat_hash_map<size_t, uint32_t> positions_, leaves_;  // of nodes and values, in the piece
  Piece piece_;
};

}  // namespace

std::vector<Piece> cut(const Graph& graph, const std::vector<uint32_t>& stages) {
  const std::vector<int32_t> maker = makers(graph);
  const std::vector<int64_t> successor = successors(graph, maker.size());
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
    for (size_t j = 0; j < graph.nodes[i]->operands().size(); ++j) {
      const uint32_t operand = graph.operand(i, j);
      if (maker[operand] >= 0 && stage_of(operand) != stages[i]) add_output(operand);
    }
  }
  std::vector<Piece> pieces;
  for (uint32_t stage = 0; stage < outputs.size(); ++stage) {
    if (outputs[stage].empty()) continue;
    Numbering numbering(graph, maker, successor, stages, stage);
    pieces.push_back(numbering.run(std::move(outputs[stage])));
    pieces.back().stage = stage;
  }
  return pieces;
}

}  // namespace lazyxla::program
