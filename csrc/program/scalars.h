// Scalars of a graph: which of them are runtime inputs of its program (program.h says why).
#pragma once

#include <vector>

#include "common/bounded_map.h"
#include "common/locks.h"
#include "program/graph.h"

namespace lazyxla::program {

// Which of a program's scalars are inputs, and which are constants.
struct ScalarPlan {
  std::vector<bool> variable;              // per slot: a runtime input
  std::vector<ir::ScalarValue> constants;  // all slots' when it was made; an input's means nothing

  // Whether a graph with these scalars can be run by a program of this plan.
  bool serves(c10::ArrayRef<ir::ScalarValue> slots) const;
  // Whether the slot has another value now, be it an input or not.
  bool differs(size_t slot, c10::ArrayRef<ir::ScalarValue> slots) const {
    return constants[slot].i != slots[slot].i;
  }
  // Whether it is an input, or has to become one.
  bool varies(size_t slot, c10::ArrayRef<ir::ScalarValue> slots) const {
    return variable[slot] || differs(slot, slots);
  }
  // These slots are static: the lowering needs their numbers, so they are no inputs.
  void fix(c10::ArrayRef<uint32_t> static_slots);
};

// The kind of every slot of the graph, in slot order.
std::vector<ir::SlotKind> slot_kinds(const Graph& graph);

// The scalars that each kind of operator had in the program compiled last, by its index among those
// of its kind. The first steps of a training loop are different programs (the optimizer makes its
// state, then uses it), but the same operators take the step count in both: a scalar that differs
// from the last program's is presumed to vary, which saves compiling once more.
class ScalarHistory {
 public:
  // That of the programs that run here. Those of several processes have one of their own, for each
  // mesh and for the same replicas, since all must decide the same. The two are separate: a mesh
  // must not learn from graphs that not all processes have (replicas.h).
  static ScalarHistory& of(const Graph& graph);

  // Per slot, whether it is an input of the program now to be made; remembers this graph's. `last`
  // is the plan of the last program for the same key, null if there is none: what varied since is
  // an input, and so is the same slot of other operators of the same kind.
  std::vector<bool> variable_slots(const Graph& graph, const ScalarPlan* last);

 private:
  // Sets `variable` where a slot differs from its predecessor.
  void presume(const Graph& graph, std::vector<bool>& variable);

  Guarded<BoundedMap<uint64_t, std::vector<std::vector<ir::ScalarValue>>>> past_;
};

}  // namespace lazyxla::program
