// Scalars of a graph: which of them are runtime inputs of its program (program.h says why).
#pragma once

#include <mutex>
#include <vector>

#include "common/bounded_map.h"
#include "graph/walk.h"

namespace lazyxla::graph {

// The kind of every slot of the graph, in slot order.
std::vector<ir::SlotKind> slot_kinds(const Graph& graph);

// The scalars that each kind of operator had in the program compiled last, by its place among those
// of its kind. The first steps of a training loop are different programs (the optimizer makes its
// state, then uses it), but the same operators take the step count in both: a scalar that differs
// from the last program's is presumed to vary, which saves compiling once more.
class ScalarHistory {
 public:
  // That of the programs that run.
  static ScalarHistory& get();

  // Per slot, whether it is an input of the program now to be made; remembers this graph's.
  // `variable` and `constants` are those of the last program for the same key, null if there is
  // none.
  std::vector<bool> variable_slots(const Graph& graph, const std::vector<bool>* variable,
                                   const std::vector<ir::ScalarValue>* constants);

 private:
  // Sets `variable` where a slot differs from its predecessor.
  void presume(const Graph& graph, std::vector<bool>& variable);

  std::mutex mutex_;
  ir::BoundedMap<uint64_t, std::vector<std::vector<ir::ScalarValue>>> past_;
};

}  // namespace lazyxla::graph
