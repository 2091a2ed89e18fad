#include "graph/parts.h"

#include "record/scope.h"

namespace lazyxla::graph {

Parts::Parts(ir::PendingSet& pending, std::vector<Graph> graphs, std::vector<ExecutionSlot> slots)
    : pending_(pending), origin_{user_line(), current_scope()}, draws_(std::move(graphs[0].draws)) {
  for (size_t i = 0; i < graphs.size(); ++i) {
    replaces_ = replaces_ || replaces(graphs[i]);
    auto program = find_program(graphs[i]);
    parts_.push_back({std::move(slots[i]), std::move(program),
                      std::make_shared<Missed>(std::move(graphs[i])), nullptr});
  }
}

void Parts::make() {
  for (Part& part : parts_) {
    std::vector<ir::Draws>& draws = part.missed->graph.draws;
    try {
      part.variant = part.program->find(part.missed->graph);
      if (part.variant) continue;
      draws.swap(draws_);  // they go back if this part cannot be made
      part.variant = make_program(pending_, part.program, part.missed, Compile::kNow, origin_,
                                  part.slot, replaces_);
      draws.swap(draws_);
    } catch (const c10::NotImplementedError&) {  // an operator cannot be lowered
      end_others(part, replaces_ ? std::current_exception() : nullptr);
      throw;
    } catch (const std::exception&) {
      if (part.slot.is_used()) {
        leave_others(part);  // interrupted
      } else {
        end_others(part, std::current_exception());
      }
      throw;
    }
  }
}

void Parts::run() {
  std::exception_ptr failure;
  bool any_ran = false;
  for (Part& part : parts_) {
    ExecutionSlot slot = std::move(part.slot);  // ends with the run
    try {
      std::vector<Replaced> replaced = let_go(part);
      slot.run_now(part.variant, part.missed->run(replaced));
      any_ran = true;
    } catch (const std::exception&) {
      if (!failure) failure = std::current_exception();
      if (!slot.is_used()) continue;
      leave_others(part);
      any_ran = true;
      break;
    }
  }
  if (!failure) return;
  if (!any_ran) rewind(draws_);
  std::rethrow_exception(failure);
}

// What the storages had before. What only the graph keeps alive goes, so that memory can be given
// away.
std::vector<Replaced> Parts::let_go(Part& part) {
  part.over = true;
  std::vector<Replaced> replaced = replaced_by(part.missed->graph);
  part.missed->graph.taken.clear();
  return replaced;
}

void Parts::leave_others(const Part& left) {
  for (Part& part : parts_) {
    if (&part == &left || part.over) continue;
    std::vector<Replaced> replaced = let_go(part);
    part.slot.run_when_found(
        [variant = part.variant, program = part.program, missed = part.missed, origin = origin_] {
          if (variant) return variant;
          return start_making(program, missed, Compile::kNow, origin)->get();
        },
        part.missed->run(replaced));
  }
}

// They fail for the same reason; without one they are pending again.
void Parts::end_others(const Part& failed, const std::exception_ptr& reason) {
  for (Part& part : parts_) {
    if (&part == &failed || part.over) continue;
    if (!reason) {
      make_pending_again(pending_, part.missed->graph);
      continue;
    }
    std::vector<Replaced> replaced = replaced_by(part.missed->graph);
    try {
      keeping(part.missed->run(replaced), pending_.device, [&] { std::rethrow_exception(reason); });
    } catch (const std::exception&) {
      // it is told for the part that failed
    }
  }
}

}  // namespace lazyxla::graph
