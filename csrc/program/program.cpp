#include "program/program.h"

#include <c10/core/thread_pool.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <thread>

#include "common/bytes.h"
#include "common/counters.h"
#include "common/options.h"
#include "pjrt/error.h"
#include "program/planner.h"
#include "program/program_store.h"
#include "program/replicas.h"
#include "program/scalars.h"
#include "program/stages.h"

namespace lazyxla::program {
namespace {

// A rule that makes a slot static may meet a new value at every step; its variants must not pile
// up.
constexpr size_t kMaxVariants = 64;

auto& lowerer = *new Lowerer();

c10::ThreadPool& compilers() {
  static auto* pool =
      new c10::ThreadPool(std::clamp<int>(std::thread::hardware_concurrency(), 1, 8));
  return *pool;
}

void compile(const std::shared_ptr<Variant>& variant, std::string artifact,
             const CompileOptions& options, const Keep& keep, Compile how) {
  ++Counters::get().compiles;
  if (how == Compile::kInBackground) {
    compilers().run(
        [=, artifact = std::move(artifact)] { variant->compile(artifact, options, keep); });
  } else {
    variant->compile(artifact, options, keep);
    variant->check_compiled();
  }
}

bool spans_processes(const Graph& graph) {
  return graph.replicas || (graph.partition && graph.partition->spans_processes());
}

// What the processes must agree on, and what is reported if they do not. The hash covers the
// operators, the edges between them, and the numbers that are constants.
std::unique_ptr<Identity> identity_of(const Graph& graph, const std::string& portable_key,
                                      const std::string& options, const ScalarPlan& scalars) {
  auto identity = std::make_unique<Identity>();
  std::string text = portable_key + options + (graph.partition ? graph.partition->text() : "");
  for (const ir::NodePtr& node : graph.nodes) {
    std::string line = node->spec()->name;
    for (const ir::TensorType& type : node->spec()->outputs) {
      line += c10::str(" ", type.dtype, c10::IntArrayRef(type.dims));
    }
    text += line + "\n";
    identity->operators.push_back(std::move(line));
  }
  identity->without_numbers = std::hash<std::string>()(text);
  for (size_t i = 0; i < scalars.variable.size(); ++i) {
    put(text, scalars.variable[i] ? int64_t{-1} : scalars.constants[i].i);
  }
  identity->hash = std::hash<std::string>()(text);
  return identity;
}

}  // namespace

void set_lowerer(Lowerer new_lowerer) { lowerer = std::move(new_lowerer); }

VariantRef Program::known(const Graph& graph) {
  for (const VariantRef& variant : variants_) {
    if (!variant->matches(graph.slots)) continue;
    ++Counters::get().cache_hits;
    note_again();
    return variant;
  }
  return nullptr;
}

VariantRef Program::find(const Graph& graph) {
  std::unique_lock lock(mutex_, std::try_to_lock);
  return lock && !is_on_trial() ? known(graph) : nullptr;
}

VariantRef Program::variant(const Graph& graph, Compile how, const Origin& of_flush) {
  std::lock_guard lock(mutex_);
  Origin origin = of_flush;
  origin.on_host = note_flush(of_flush);
  if (is_on_trial()) {
    if (VariantRef variant = go_on_trying(graph, origin)) return variant;
  }
  if (VariantRef variant = known(graph)) return variant;
  struct Making {
    explicit Making(std::atomic<bool>& flag) : flag(flag) { flag = true; }
    ~Making() { flag = false; }
    std::atomic<bool>& flag;
  } making(is_making_);
  VariantRef variant = make(graph, how, origin);
  if (!variant->is_trial) add(variant);
  return variant;
}

OnHost Program::note_flush(const Origin& origin) {
  if (!is_new()) note_again();
  if (origin.on_host != OnHost::kTraining || !may_have_host_programs()) return origin.on_host;
  if (is_new() && !line_) {  // not if making it failed before
    line_ = Line::of(origin.line);
    if (line_) line_->note_new();
    in_changing_line_ = line_ && line_->keeps_changing();
  }
  return in_changing_line_ ? OnHost::kNewEachTime : origin.on_host;
}

void Program::note_again() {
  if (!line_) [[likely]]
    return;
  line_->note_again();
  line_ = nullptr;
}

void Program::add(VariantRef variant) {
  variants_.push_front(std::move(variant));
  if (variants_.size() > kMaxVariants) variants_.pop_back();
}

std::optional<Program::Use> Program::use() {
  if (is_making_) return std::nullopt;  // perhaps we: its stages are programs of the cache, too
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return std::nullopt;  // its holder may be waiting for the GIL, which we may hold
  Use use{.last_run = 0, .size = 0};
  for (const auto& variant : variants_) {
    use.last_run = std::max(use.last_run, variant->last_run());
    use.size += variant->size();
  }
  if (is_on_trial()) use.last_run = std::max(use.last_run, trial_->variant->last_run());
  return use;
}

std::string Program::reason(const Graph& graph, const std::vector<bool>& variable,
                            const std::string& new_reason) const {
  if (variants_.empty() && dropped_) {
    return "a known graph whose program was dropped, since there were more than "
           "LAZYXLA_MAX_PROGRAMS";
  }
  if (variants_.empty() && trial_) {
    const std::string how = trial_->on_host ? "PyTorch's kernels ran before, " : "ran cut before, ";
    return "a graph that " + how + std::to_string(trial_->runs - 1) +
           (trial_->runs == 2 ? " time" : " times");
  }
  if (variants_.empty()) return new_reason;
  const ScalarPlan& last = variants_.front()->scalars;
  size_t changed = 0, fixed = 0;
  for (size_t i = 0; i < graph.slots.size(); ++i) {
    if (last.variable[i] || !last.differs(i, graph.slots)) continue;
    ++(variable[i] ? changed : fixed);
  }
  std::string text = "a known graph with other numbers: ";
  if (changed) text += std::to_string(changed) + " become inputs";
  if (changed && fixed) text += ", ";
  if (fixed) text += std::to_string(fixed) + " are needed to compile";
  return text;
}

std::vector<bool> Program::wanted_inputs(const Graph& graph) const {
  std::vector<bool> variable = ScalarHistory::of(graph).variable_slots(
      graph, variants_.empty() ? nullptr : &variants_.front()->scalars);
  const bool all = others_have_other_numbers();
  for (size_t i = 0; i < variable.size(); ++i) {
    if (all || (i < varying_.size() && varying_[i])) variable[i] = true;
    if (static_slots_[i]) variable[i] = false;
  }
  return variable;
}

bool Program::others_have_other_numbers() const {
  return std::any_of(variants_.begin(), variants_.end(),
                     [](const VariantRef& variant) { return variant->has_other_numbers(); });
}

std::vector<bool> Program::needed_inputs(const Graph& graph) const {
  std::vector<bool> needed(graph.slots.size(), false);
  if (variants_.empty()) return needed;
  const ScalarPlan& last = variants_.front()->scalars;
  for (size_t i = 0; i < needed.size(); ++i) {
    needed[i] = !static_slots_[i] && last.varies(i, graph.slots);
  }
  return needed;
}

namespace {

// Whether the largest of a plan's stages that are not new is a known program.
bool is_known(const Graph& graph, const Plan& plan) {
  const std::vector<Piece> pieces = cut(graph, plan.stages);
  const Piece* largest = nullptr;
  for (const Piece& piece : pieces) {
    if (plan.even_are_new && piece.stage % 2 == 0) continue;
    if (!largest || piece.graph.nodes.size() > largest->graph.nodes.size()) largest = &piece;
  }
  return largest && is_known(largest->graph);
}

// False if the plugin does not load it; then `why` is its message.
bool load(Variant& variant, const std::string& serialized, std::string& why) {
  try {
    variant.load(serialized);
    return true;
  } catch (const pjrt::Error& error) {
    why += std::string("; what is kept on disk does not load: ") + error.what();
    return false;
  }
}

}  // namespace

bool is_on_disk(const Graph& graph) {
  const auto stored = program_store(portable_key(graph), pjrt::serialize(compile_options(graph)));
  return stored && stored->is_kept();
}

std::string Program::take_plan(const Graph& graph, const Origin& origin) {
  const bool apart = is_cut_at_collectives(graph);
  const bool may_cut = origin.may_cut && options().cut_graphs && !graph.partition && !apart;
  const bool changes = origin.on_host == OnHost::kNewEachTime;
  // The first runs of a graph that the host does are not worth programs of its parts.
  const bool may_alternate = changes || !may_be_tried(graph, origin.on_host);
  Plan plan = planner.plan(graph, may_cut, !changes || line_->may_share(), may_alternate);
  if (!spans_processes(graph) && !apart) varying_ = std::move(plan.varying);
  const bool has_stages = may_cut && !plan.stages.empty();
  const bool is_shared = has_stages && is_known(graph, plan);
  if (line_) line_->note_plan(is_shared);
  if (is_shared || (has_stages && plan.is_certain)) {
    stages_ = std::move(plan.stages);
  } else if (!plan.otherwise.empty()) {
    stages_ = std::move(plan.otherwise);
    plan.reason += ", after what makes tensors of no data";
  }
  if (changes && plan.even_are_new && !stages_.empty()) stages_ = stages_on_host(graph, stages_);
  return plan.reason;
}

VariantRef Program::make(const Graph& graph, Compile how, const Origin& origin) {
  if (graph.partition) graph.partition->check();
  if (graph.replicas && graph.replicas->by_host) return make_exchange(graph, origin);
  const bool was_new = is_new();
  if (!origin.varying.empty()) varying_ = origin.varying;
  std::string new_reason = origin.part_of;
  if (was_new && new_reason.empty()) new_reason = take_plan(graph, origin);
  if (is_cut_at_collectives(graph)) return make_apart(graph, origin, new_reason);
  if (!stages_.empty()) {
    try {
      const bool is_kept = was_new && is_on_disk(graph);
      if (!is_kept) return make_cut(graph, origin, new_reason, was_new);
    } catch (const std::exception&) {
      // The graph is then compiled whole, which reports what is wrong with it.
    }
    stages_.clear();
  }
  if (variants_.empty() && !trial_ && !graph.partition && !graph.replicas) {
    if (VariantRef variant = make_on_host(graph, origin, new_reason)) return variant;
  }
  return make_whole(graph, how, origin, new_reason);
}

std::shared_ptr<Variant> Program::make_stages(const Graph& graph,
                                              const std::vector<uint32_t>& stages,
                                              const Origin& origin, const std::string& reason,
                                              bool is_new) const {
  const std::vector<Piece> pieces = cut(graph, stages);
  if (is_new) {
    std::vector<size_t> operators;
    for (const Piece& piece : pieces) operators.push_back(piece.graph.nodes.size());
    ++Counters::get().graphs_cut;
    if (listeners.cut) listeners.cut(operators, {origin.line, reason, graph.hash});
  }
  return compile_pieces(graph, pieces, origin, reason, varying_);
}

VariantRef Program::make_apart(const Graph& graph, const Origin& origin,
                               const std::string& reason) const {
  TORCH_CHECK_NOT_IMPLEMENTED(!graph.partition,
                              "lazyxla: tensors that are spread over this process's devices take "
                              "part in torch.distributed's collectives; one process's collectives "
                              "are of one device");
  // No part is left to the host: it would wait there for the others' collectives.
  const Origin of_parts{.line = origin.line, .admit = origin.admit};
  std::string why = reason.empty() ? "a known graph with other numbers" : reason;
  if (origin.admit) why = origin.admit(why);
  std::vector<Piece> pieces = cut_at_collectives(graph);
  if (VariantRef whole = make_of_all(graph, pieces, of_parts, why)) return whole;
  return compile_pieces(graph, pieces, of_parts, why, varying_);
}

VariantRef Program::make_of_all(const Graph& graph, std::vector<Piece>& pieces,
                                const Origin& origin, const std::string& reason) const {
  std::optional<Piece> whole = whole_of(graph);
  if (!whole) return nullptr;
  std::vector<Piece> one;
  one.push_back(std::move(*whole));
  try {
    const auto variant = compile_pieces(graph, one, origin, reason, varying_);
    if (!variant->stages.front().variant->identity) return nullptr;
    variant->apart = std::make_shared<Apart>(without_data(graph), std::move(one), std::move(pieces),
                                             origin, reason, varying_);
    return variant;
  } catch (const LoweringFailure&) {
    return nullptr;  // what only the host computes may be cut out
  }
}

VariantRef Program::make_exchange(const Graph& graph, const Origin& origin) const {
  auto variant = std::make_shared<Variant>();
  variant->line = origin.line;
  variant->replicas = graph.replicas;
  variant->scalars.constants = graph.slots;
  variant->take(collectives().on_host(graph), graph.slots.size());
  return variant;
}

VariantRef Program::make_whole(const Graph& graph, Compile how, const Origin& origin,
                               const std::string& new_reason) {
  static_slots_.resize(graph.slots.size(), false);
  const std::vector<ir::SlotKind> kinds = slot_kinds(graph);
  std::vector<bool> wanted = wanted_inputs(graph);
  const CompileOptions options = compile_options(graph);
  const std::string options_text = pjrt::serialize(options);
  std::string why = reason(graph, wanted, new_reason);
  if (origin.admit) why = origin.admit(why);

  auto variant = std::make_shared<Variant>();
  variant->line = origin.line;
  variant->partition = graph.partition;
  variant->replicas = graph.replicas;
  variant->note_operators(graph.operators());
  const auto portable = portable_key(graph);
  const uint64_t key = portable ? std::hash<std::string>()(*portable) : graph.hash;
  const auto stored = program_store(portable, options_text);
  std::optional<StoredGraph::Found> found;
  if (stored) found = stored->find(wanted, needed_inputs(graph), graph.slots);
  // What other processes have on disk may be for other scalars.
  if (found && spans_processes(graph) && found->variable != wanted) found.reset();
  bool loaded = found && load(*variant, found->executable, why);
  Lowered lowered;
  if (loaded) {
    lowered.static_slots = std::move(found->static_slots);
    variant->scalars.variable = std::move(found->variable);
  } else {
    if (stored && !found && variants_.empty()) why += stored->explain_miss();
    variant->scalars.variable = wanted;
    lowered = lowerer(graph, wanted, {origin.line, why, key});
    ++Counters::get().lowerings;
    Counters::get().nodes_lowered += static_cast<int64_t>(graph.nodes.size());
  }

  for (uint32_t slot : lowered.static_slots) static_slots_[slot] = true;
  variant->scalars.fix(lowered.static_slots);
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (!variant->scalars.variable[i]) continue;
    (kinds[i] == ir::SlotKind::kFloat ? variant->float_slots : variant->int_slots).push_back(i);
  }
  variant->scalars.constants = graph.slots;
  if (spans_processes(graph) && (portable || graph.partition)) {
    auto identity = identity_of(graph, portable.value_or(""), options_text, variant->scalars);
    // The numbers that are left are needed to compile.
    if (others_have_other_numbers()) identity->without_numbers = 0;
    variant->identity = std::move(identity);
  }

  if (!loaded) {
    StoredGraph::Added added;
    if (stored) added = stored->add(wanted, graph.slots, lowered.static_slots, lowered.artifact);
    loaded = added.executable && load(*variant, *added.executable, why);
    if (!loaded) compile(variant, std::move(lowered.artifact), options, added.keep, how);
  }
  if (loaded) {
    ++Counters::get().programs_loaded;
    if (listeners.loaded) listeners.loaded(graph.nodes.size(), {origin.line, why, key});
  }
  return variant;
}

}  // namespace lazyxla::program
