// The parts of a graph that was taken apart (walk.h's split): a program each.
//
// None runs before all are made: if making one fails, all of the graph is undone. A part that fails
// while it runs undoes itself; what the others computed stands.
#pragma once

#include "graph/missed.h"

namespace lazyxla::graph {

class Parts {
 public:
  // One slot for each graph.
  Parts(ir::PendingSet& pending, std::vector<Graph> graphs, std::vector<ExecutionSlot> slots);

  void make();

  // Runs all, whatever becomes of some; throws the first failure.
  void run();

 private:
  struct Part {
    ExecutionSlot slot;
    std::shared_ptr<Program> program;
    std::shared_ptr<Missed> missed;
    VariantRef variant;
    bool over = false;  // run, or undone
  };

  static std::vector<Replaced> let_go(Part& part);
  void leave_others(const Part& left);
  void end_others(const Part& failed, const std::exception_ptr& reason);

  ir::PendingSet& pending_;
  const Origin origin_;
  std::vector<Part> parts_;
  std::vector<ir::Draws> draws_;  // of all parts together
  bool replaces_ = false;         // storages had something before
};

}  // namespace lazyxla::graph
