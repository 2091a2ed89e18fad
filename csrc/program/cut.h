// Cutting: a graph that is run as several programs, one after the other.
//
// Most are new but for a few operators, or hold many rounds of a loop; lazyxla/planning finds where
// they are best cut. Others are cut at their collectives (replicas.h).
//
// The stages' graphs are numbered as the walk numbers any graph: one may equal a graph that another
// flush recorded on its own.
#pragma once

#include <vector>

#include "program/graph.h"

namespace lazyxla::program {

// A stage's own graph, without its data: promises, storages and draws are those of the whole.
struct Piece {
  Graph graph;
  std::vector<uint32_t> inputs;   // per leaf, its number in the whole
  std::vector<uint32_t> outputs;  // likewise
  std::vector<uint32_t> slots;    // per slot, its position in the whole
  uint32_t stage = 0;             // its number in the plan
};

// The non-empty stages, in their order. `stages`: each node's. None takes a result of a later one.
std::vector<Piece> cut(const Graph& graph, const std::vector<uint32_t>& stages);

}  // namespace lazyxla::program
