// Rounds: a graph that holds many rounds of a loop, for want of a sync in it.
//
//     for t in timesteps:              50 rounds of the same operators on the same weights: one
//         x = step(model(x, t), t, x)  program that runs 50 times, in place of one of 50 models
//     x.cpu()
//
// What tells a loop from a deep model is that its rounds take the same leaves, or none: layers have
// weights of their own. A program ends where it hands the fewest values on.
#pragma once

#include <vector>

#include "program/cut.h"

namespace lazyxla::graph {

struct Rounds {
  std::vector<uint32_t> stages;  // per node; a round or several of them are one
  size_t operators = 0;          // of a stage
  size_t count = 0;              // of such stages
};

// Empty if there are no rounds, or the graph is too small to care.
Rounds find_rounds(const Graph& graph);

}  // namespace lazyxla::graph
