#include "program/graph.h"

#include <algorithm>
#include <optional>

#include "common/hash.h"
#include "program/replicas.h"

namespace lazyxla::program {
namespace {

// Marks of the key's sections; OpSpec ids are below them.
enum Mark : uint64_t { kLeaf = uint64_t{1} << 56, kOutputs = uint64_t{2} << 56 };

// If a write made the value from earlier content of the same storage, that content.
std::optional<uint32_t> written_over(const Graph& graph, uint32_t value) {
  const size_t number = graph.maker(value);
  const ir::Node& node = *graph.nodes[number].get();
  const ir::TensorType& type = node.output_type(value - graph.values[number]);
  if (type.numel() == 0) return std::nullopt;
  for (size_t i = 0; i < node.operands().size(); ++i) {
    const ir::Value& operand = node.operands()[i];
    if (operand.node->is_written_over() && operand.type() == type) return graph.operand(number, i);
  }
  return std::nullopt;
}

}  // namespace

uint32_t Graph::operand(size_t node, size_t position) const {
  uint64_t code = key[records[node] + position];
  auto number = static_cast<uint32_t>(code >> 32);
  return code & 1 ? number : values[number] + (static_cast<uint32_t>(code) >> 1);
}

size_t Graph::maker(uint32_t value) const {
  return std::upper_bound(values.begin(), values.end(), value) - values.begin() - 1;
}

int64_t Graph::operators() const {
  int64_t count = 0;
  for (const ir::NodePtr& node : nodes) count += node->spec()->operators;
  return count;
}

std::vector<Made> Graph::made_first() const {
  std::vector<Made> found;
  for (const Taken& storage : taken) {
    if (storage.committed) continue;
    std::optional<uint32_t> value = outputs[storage.output];
    while (value && !nodes[maker(*value)]->is_made_first()) value = written_over(*this, *value);
    if (value) found.push_back({*value, outputs[storage.output]});
  }
  return found;
}

uint32_t Graph::add_leaf(ir::NodePtr leaf) {
  const ir::TensorType& type = leaf->output_type(0);
  key.push_back(kLeaf | (static_cast<uint64_t>(type.dtype) << 32) | type.dims.size());
  key.insert(key.end(), type.dims.begin(), type.dims.end());
  leaves.push_back(std::move(leaf));
  return leaves.size() - 1;
}

uint32_t Graph::add_node(ir::NodePtr node) {
  key.push_back(node->spec()->id);
  records.push_back(key.size());
  slots.insert(slots.end(), node->slots().begin(), node->slots().end());
  nodes.push_back(std::move(node));
  return nodes.size() - 1;
}

void Graph::number_values() {
  uint32_t next = leaves.size();
  values.reserve(nodes.size());
  for (const ir::NodePtr& node : nodes) {
    values.push_back(next);
    next += node->spec()->outputs.size();
  }
}

void Graph::complete_key() {
  key.push_back(kOutputs);
  key.insert(key.end(), outputs.begin(), outputs.end());
  for (int alias : aliases) key.push_back(static_cast<uint64_t>(alias) + 1);
  if (partition) partition->add_to_key(key);
  hash = hash_words(key.data(), key.size());
}

void Graph::set_replicas(std::shared_ptr<const Replicas> of) {
  replicas = std::move(of);
  replicas->add_to_key(key);
  hash = hash_words(key.data(), key.size());
}

void Graph::clear() {
  clear_numbers();
  output_types.clear();
  promises.clear();
  taken.clear();
  draws.clear();
}

void Graph::clear_numbers() {
  leaves.clear();
  nodes.clear();
  values.clear();
  records.clear();
  outputs.clear();
  aliases.clear();
  donated.clear();
  slots.clear();
  key.clear();
  partition = nullptr;
  replicas = nullptr;
}

}  // namespace lazyxla::program
