#include "program/replicas.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <numeric>

#include "pjrt/client.h"
#include "pjrt/runtime.h"
#include "program/planner.h"

namespace lazyxla::program {
namespace {

// Marks the replicas in a key, as kPartition the partition.
constexpr uint64_t kReplicas = uint64_t{4} << 56;

auto& known_collectives = *new Collectives();

// One collective's graph, the same in all processes: nothing is taken over or left out.
Piece collective_piece(const Graph& whole, size_t position) {
  const ir::NodePtr& node = whole.nodes[position];
  Piece piece;
  Graph& graph = piece.graph;
  graph.key.push_back(whole.key[0]);
  for (size_t i = 0; i < node->operands().size(); ++i) {
    piece.inputs.push_back(whole.operand(position, i));
    graph.add_leaf(ir::Node::make_leaf(node->operands()[i].type(), nullptr));
  }
  graph.add_node(node);
  for (uint32_t leaf = 0; leaf < graph.leaves.size(); ++leaf) graph.add_operand(leaf, 0, true);
  graph.number_values();
  for (uint32_t i = 0; i < node->spec()->outputs.size(); ++i) {
    graph.outputs.push_back(graph.values[0] + i);
    piece.outputs.push_back(whole.values[position] + i);
  }
  graph.aliases.assign(graph.leaves.size(), -1);
  graph.complete_key();
  const auto [group, ranks, by_host, _] = collectives().caller_of(*node->spec());
  Replicas replicas{.devices = devices_of_ranks(ranks), .by_host = by_host};
  Ranks row(ranks.size());
  std::iota(row.begin(), row.end(), 0);
  replicas.groups.push_back({.name = group, .rows = {row}});
  replicas.token_input = piece.inputs.size() - 1;
  replicas.token_result = piece.outputs.size() - 1;
  graph.set_replicas(std::make_shared<Replicas>(std::move(replicas)));
  return piece;
}

// Of each process.
std::vector<int64_t> first_devices() {
  const pjrt::Client& client = pjrt::Runtime::get().client();
  std::vector<int64_t> first;
  for (size_t i = 0; i < client.all_devices().size(); ++i) {
    if (client.process_of(i) == static_cast<int>(first.size())) first.push_back(i);
  }
  return first;
}

// Of a whole graph, but for its token.
std::optional<Replicas> replicas_of(const Graph& graph) {
  Replicas replicas{.is_whole = true, .calls = 0};
  std::vector<Ranks> members;  // of each group
  for (const ir::NodePtr& node : graph.nodes) {
    if (!node->spec()->collective) continue;
    auto [name, ranks, by_host, compares] = collectives().caller_of(*node->spec());
    if (by_host || !compares) return std::nullopt;
    auto group = std::find_if(replicas.groups.begin(), replicas.groups.end(),
                              [&](const Replicas::Group& each) { return each.name == name; });
    if (group == replicas.groups.end()) {
      group = replicas.groups.insert(group, {.name = name, .first = replicas.calls, .calls = 0});
      members.push_back(std::move(ranks));
    }
    ++group->calls;
    ++replicas.calls;
  }
  std::optional<ReplicaGroups> arranged = planner.arrange(members);
  const auto processes = static_cast<int64_t>(first_devices().size());
  if (!arranged || arranged->ranks.front() < 0 || arranged->ranks.back() >= processes) {
    return std::nullopt;  // no such grid
  }
  for (size_t i = 0; i < members.size(); ++i) {
    replicas.groups[i].rows = std::move(arranged->rows[i]);
  }
  replicas.devices = devices_of_ranks(arranged->ranks);
  return replicas;
}

}  // namespace

std::string Replicas::devices_text() const { return c10::Join(",", devices); }

std::optional<std::string> Replicas::describe(const std::string& group) const {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].name != group) continue;
    std::string text = std::to_string(i);
    for (const Ranks& row : groups[i].rows) text += " [" + c10::Join(",", row) + "]";
    return text;
  }
  return std::nullopt;
}

void Replicas::add_to_key(std::vector<uint64_t>& key) const {
  key.push_back(kReplicas | (is_whole ? 2 : 0) | (by_host ? 1 : 0));
  key.insert(key.end(), devices.begin(), devices.end());
}

void set_collectives(Collectives collectives) { known_collectives = std::move(collectives); }
const Collectives& collectives() { return known_collectives; }

std::vector<int64_t> devices_of_ranks(const std::vector<int64_t>& ranks) {
  const std::vector<int64_t> first = first_devices();
  std::vector<int64_t> devices;
  for (int64_t rank : ranks) devices.push_back(first.at(rank));
  return devices;
}

bool collectives_are_programs() {
  pjrt::Runtime& runtime = pjrt::Runtime::get();
  return runtime.client().spans_processes() || !runtime.takes_host_handler();
}

bool is_cut_at_collectives(const Graph& graph) {
  if (graph.replicas) return false;
  const bool has_any =
      std::any_of(graph.nodes.begin(), graph.nodes.end(),
                  [](const ir::NodePtr& node) { return node->spec()->collective; });
  return has_any && collectives_are_programs();
}

std::optional<Piece> whole_of(const Graph& graph) {
  if (graph.nodes.size() == 1) return std::nullopt;
  std::optional<Replicas> replicas = replicas_of(graph);
  if (!replicas) return std::nullopt;

  Piece whole = std::move(cut(graph, std::vector<uint32_t>(graph.nodes.size(), 0)).front());
  const Graph& made = whole.graph;
  const auto is_collective = [](const ir::NodePtr& node) { return node->spec()->collective; };
  const auto first = std::find_if(made.nodes.begin(), made.nodes.end(), is_collective);
  const auto last = std::find_if(made.nodes.rbegin(), made.nodes.rend(), is_collective).base() - 1;
  replicas->token_input = made.operand(first - made.nodes.begin(), (*first)->operands().size() - 1);
  const uint32_t token =
      made.values[last - made.nodes.begin()] + (*last)->spec()->outputs.size() - 1;
  const auto result = std::find(made.outputs.begin(), made.outputs.end(), token);
  if (replicas->token_input >= made.leaves.size() || result == made.outputs.end()) {
    return std::nullopt;  // a token that is lost
  }
  replicas->token_result = result - made.outputs.begin();
  whole.graph.set_replicas(std::make_shared<Replicas>(std::move(*replicas)));
  return whole;
}

std::vector<Piece> cut_at_collectives(const Graph& graph) {
  ska::flat_hash_map<const ir::Node*, size_t> positions;  // of collectives
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (graph.nodes[i]->spec()->collective) positions[graph.nodes[i].get()] = i;
  }
  std::vector<Piece> pieces = cut(graph, planner.cut_at_collectives(graph));
  for (Piece& piece : pieces) {
    const auto found = positions.find(piece.graph.nodes[0].get());
    if (found != positions.end()) piece = collective_piece(graph, found->second);
  }
  return pieces;
}

}  // namespace lazyxla::program
