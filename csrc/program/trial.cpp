// The first runs of a graph that is not compiled at once: the host's, and those in stages.
#include <set>

#include "common/counters.h"
#include "common/options.h"
#include "program/program.h"
#include "program/stages.h"

namespace lazyxla::program {
namespace {

// In training a graph that recurs is likely to be a loop's step. An operator may recur in one step,
// once for each layer, and be another one in the next.
Trial trial_of(const Graph& graph, VariantRef variant, OnHost which) {
  if (!is_medium(graph)) return {.variant = std::move(variant), .compiled_at = 2, .most = 8};
  switch (which) {
    case OnHost::kOneOperator:
      return {.variant = std::move(variant), .compiled_at = 24, .most = 32};
    case OnHost::kNewEachTime:
      return {.variant = std::move(variant), .compiled_at = 4, .most = 16};
    default:
      return {.variant = std::move(variant), .compiled_at = 4, .most = 64};
  }
}

// Whether some of its stages are the same program, as the rounds of a loop are.
bool has_rounds(const Variant& variant) {
  std::set<const Variant*> programs;
  for (const StageProgram& stage : variant.stages) programs.insert(stage.variant.get());
  return programs.size() < variant.stages.size();
}

// Whether it is one program but for what makes tensors of no data: the whole would be no faster.
bool only_makes_apart(const Variant& variant) {
  return variant.stages.size() == 2 && variant.stages.front().inputs.empty();
}

std::shared_ptr<Variant> of_host(const Graph& graph, HostProgram program, const Origin& origin,
                                 const std::string& reason) {
  auto variant = std::make_shared<Variant>();
  variant->line = origin.line;
  variant->scalars.constants = graph.slots;
  variant->take(std::move(program), graph.slots.size());
  if (listeners.on_host) listeners.on_host(graph, {origin.line, reason, graph.hash});
  return variant;
}

}  // namespace

VariantRef Program::make_on_host(const Graph& graph, const Origin& origin,
                                 const std::string& reason) {
  if (auto program = find_host_program(graph, origin.on_host)) {
    return of_host(graph, std::move(*program), origin, reason);
  }
  if (!may_be_tried(graph, origin.on_host) || is_on_disk(graph)) return nullptr;
  VariantRef variant = make_tried(graph, origin, reason, /*is_new=*/true);
  if (variant) trial_ = trial_of(graph, variant, origin.on_host);
  return variant;
}

VariantRef Program::make_cut(const Graph& graph, const Origin& origin, const std::string& reason,
                             bool is_new) {
  std::shared_ptr<Variant> variant = make_stages(graph, stages_, origin, reason, is_new);
  if (variant->is_trial || has_rounds(*variant) || only_makes_apart(*variant)) return variant;
  variant->is_trial = true;
  trial_ = {.variant = variant, .compiled_at = 48, .most = 64, .on_host = false};
  return variant;
}

VariantRef Program::make_tried(const Graph& graph, const Origin& origin, const std::string& reason,
                               bool is_new) const {
  std::shared_ptr<Variant> variant;
  if (!stages_.empty()) {
    variant = make_stages(graph, stages_, origin, reason, is_new);
  } else if (auto program = find_trial_program(graph)) {
    variant = of_host(graph, std::move(*program), origin, reason);
  } else if (origin.part_of.empty() && options().cut_graphs) {
    const auto stages = stages_on_host(graph, std::vector<uint32_t>(graph.nodes.size(), 0));
    if (stages.back() == 0) return nullptr;  // no operator has a stage of its own
    Origin of_stages = origin;
    of_stages.on_host = OnHost::kNewEachTime;
    try {
      variant = make_stages(graph, stages, of_stages, reason, is_new);
    } catch (const std::exception&) {
      return nullptr;  // compiled whole, it reports what is wrong with it
    }
  }
  if (variant) variant->is_trial = true;
  return variant;
}

VariantRef Program::go_on_trying(const Graph& graph, const Origin& origin) {
  Trial& trial = *trial_;
  varying_.resize(graph.slots.size(), false);
  for (size_t i = 0; i < graph.slots.size(); ++i) {
    if (trial.variant->scalars.differs(i, graph.slots)) varying_[i] = true;
  }
  ++trial.runs;
  const bool may_go_on = !trial.on_host || (is_tried(origin.on_host) && may_have_host_programs());
  if (!may_go_on || trial.runs > trial.most) {
    trial.variant = nullptr;
    stages_.clear();
    return nullptr;
  }
  if (trial.runs == trial.compiled_at) {
    add(make_whole(graph, Compile::kInBackground, origin, ""));
  }
  if (!trial.variant->matches(graph.slots)) {
    trial.variant = make_tried(graph, origin, "a known graph with other numbers", false);
  } else {
    ++Counters::get().cache_hits;
  }
  return trial.variant;
}

}  // namespace lazyxla::program
