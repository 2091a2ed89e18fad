// History: what was compiled lately, to tell why something else is compiled now.
//
// "A new graph" explains nothing to a user whose loop compiles in every turn. So the last compiled
// graphs are remembered in outline, and a new one is compared with the most similar of them:
//
//     a new graph: like one before, but input 0 is Float[8, 3], not Float[4, 3]
//     a new graph: like one before up to operator 12, aten::mul.Tensor, which was aten::add.Tensor
#pragma once

#include <string>

#include "graph/walk.h"

namespace lazyxla::graph {

// Why the graph is new, in words; remembers the graph.
std::string explain_new(const Graph& graph);

}  // namespace lazyxla::graph
