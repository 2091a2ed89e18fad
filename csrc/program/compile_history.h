// History: what was compiled lately, to explain why something else is compiled now, and which part
// of it is the same.
//
// "A new graph" explains nothing to a user whose loop compiles in every iteration. So the last
// compiled graphs are remembered in outline, and a new one is compared with the most similar of
// them:
//
//     a new graph: like one before, but input 0 is Float[8, 3], not Float[4, 3]
//     a new graph: like one before up to operator 12, aten::mul.Tensor, which was aten::add.Tensor
#pragma once

#include <string>

#include "program/cut.h"

namespace lazyxla::graph {

struct Past {
  std::string reason;             // why the graph is new, in words
  std::vector<uint32_t> stages;   // how it is best cut (cut.h), if at all
  bool goes_on_changing = false;  // else it may recur unchanged: better compiled whole
  std::vector<bool> varying;      // per slot, whether it should be an input at once; or empty
};

// Compares a new graph with those before; remembers it.
Past recall(const Graph& graph);

}  // namespace lazyxla::graph
