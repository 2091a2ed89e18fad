// Cutting: a graph that is new but for a few operators is run as up to three programs.
//
// A loop whose steps differ in little (a view whose strides grow with its tensor, an augmentation
// that is chosen at random, a scheduler's formula) would compile its whole step again and again.
// So a graph that misses is compared with those before (compile_history.h), and cut where they
// differ:
//
//     before   what differs and does not depend on the large part, with what it needs
//     middle   what is the same as before: compiled once, and found from then on
//     after    what differs and depends on the middle, with what depends on it
//
//     x = flip(batch)             before       the next step's before is rotate(batch); the middle
//     loss = train(model(x))      middle       is known
//     seen = cat([seen, loss])    after
//
// A graph of many rounds of a loop is cut into these (find_rounds, below).
//
// The stages' graphs are numbered as the walk numbers any graph: the middle may equal a graph that
// another flush recorded on its own.
#pragma once

#include <vector>

#include "program/graph.h"

namespace lazyxla::graph {

constexpr uint32_t kBefore = 0, kMiddle = 1, kAfter = 2;

// The graph's edges. Per node its operands: positions of nodes, or -1 for a leaf.
class Wiring {
 public:
  explicit Wiring(const Graph& graph);
  size_t size() const { return begins_.size() - 1; }
  c10::ArrayRef<int32_t> operands(size_t node) const {
    return c10::ArrayRef<int32_t>(operands_).slice(begins_[node],
                                                   begins_[node + 1] - begins_[node]);
  }

 private:
  std::vector<uint32_t> begins_{0};
  std::vector<int32_t> operands_;
};

// Per node its stage, where `differs` marks the nodes that no earlier graph had. Empty if the graph
// is better left whole: it is small, or its middle would be less than `least` of its operators.
std::vector<uint32_t> find_stages(const Graph& graph, const Wiring& wiring,
                                  const std::vector<bool>& differs, double least);

// A stage's own graph, without its data: promises, storages and draws are those of the whole.
struct Piece {
  Graph graph;
  std::vector<uint32_t> inputs;   // per leaf, its number in the whole
  std::vector<uint32_t> outputs;  // likewise
  std::vector<uint32_t> slots;    // per slot, its position in the whole
};

// The non-empty stages, in their order. None takes a result of a later one.
std::vector<Piece> cut(const Graph& graph, const std::vector<uint32_t>& stages);

// Rounds: a graph that holds many rounds of a loop, since the loop has no sync in it.
//
//     for t in timesteps:              50 rounds of the same operators on the same weights: one
//         x = step(model(x, t), t, x)  program that runs 50 times, in place of one of 50 models
//     x.cpu()
//
// A loop differs from a deep model in that its rounds take the same leaves, or none: layers have
// weights of their own. A program ends where it hands the fewest values on.
struct Rounds {
  std::vector<uint32_t> stages;  // per node; a round or several of them are one
  size_t operators = 0;          // of a stage
  size_t count = 0;              // of such stages
};

// Empty if there are no rounds, or the graph is too small.
Rounds find_rounds(const Graph& graph);

}  // namespace lazyxla::graph
