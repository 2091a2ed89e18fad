#include "dispatch/recorder.h"

#include <ATen/native/Resize.h>

#include <mutex>
#include <optional>

#include "common/counters.h"
#include "common/hash.h"
#include "common/options.h"
#include "dispatch/checks.h"
#include "dispatch/generator.h"
#include "dispatch/host.h"
#include "dispatch/lowering_kind.h"
#include "dispatch/overlap.h"
#include "dispatch/settling.h"
#include "dispatch/storage_ops.h"
#include "dispatch/tensor.h"
#include "graph/one_operator.h"
#include "record/batches.h"
#include "record/capture.h"
#include "record/flush.h"
#include "record/recording.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using ir::Value;

// The scan's buffers are reused by the thread; a kernel that is entered again while one is at work
// (a meta function calling back) takes another.
class ScanScope {
 public:
  ScanScope() : mine_(shared()), scan_(mine_.depth == 0 ? mine_.scan : nested_.emplace()) {
    ++mine_.depth;
  }
  ~ScanScope() { --mine_.depth; }
  Scan& operator*() { return scan_; }

 private:
  struct Shared {
    int depth = 0;
    Scan scan;
  };
  static Shared& shared() {
    static thread_local Shared instance;
    return instance;
  }

  Shared& mine_;
  std::optional<Scan> nested_;
  Scan& scan_;
};

MemoKey memo_key(c10::ArrayRef<uint64_t> words) {
  return {words.data(), words.size(), hash_words(words.data(), words.size())};
}

// The recipe shared by all calls that differ in their numbers only, and have results of the same
// size.
RecipeRef shared_by_size(const Scan& scan, RecipeRef recipe) {
  c10::SmallVector<uint64_t, 64> words(scan.key.begin(), scan.key.end() - scan.numbers_in_key);
  words.push_back(~uint64_t{0});  // no tag, so it is never the key of a call
  for (const ir::TensorType& output : recipe->spec.outputs) {
    words.append(output.dims.begin(), output.dims.end());
  }
  return ShapeMemo::get().insert(memo_key(words), std::move(recipe));
}

RecipeRef infer_recipe(const OpInfo& info, LoweringKind kind, c10::ArrayRef<IValue> args,
                       const Scan& scan, const MemoKey& key) {
  auto inferred = infer(info, args, scan);
  if (!inferred) return nullptr;
  if (inferred->runs == Recipe::Runs::kNowhere) {
    // Nothing to ask.
  } else if (kind == LoweringKind::kHostCall) {
    inferred->runs = Recipe::Runs::kHostCall;
  } else if (kind == LoweringKind::kDecomposition) {
    inferred->runs = check_lowering(inferred->spec, scan);
  }
  RecipeRef made = std::move(inferred);
  if (scan.numbers_in_key > 0) made = shared_by_size(scan, std::move(made));
  return ShapeMemo::get().insert(key, std::move(made));
}

RecipeRef find_recipe(const OpInfo& info, LoweringKind kind, c10::ArrayRef<IValue> args,
                      const Scan& scan) {
  const MemoKey key = memo_key(scan.key);
  RecipeRef recipe = ShapeMemo::get().find(key);
  check_numbers(info, args, scan, key.hash);
  if (!recipe) recipe = infer_recipe(info, kind, args, scan, key);
  if (recipe) give_warnings(info, args, scan, key.hash);
  return recipe;
}

ir::Draws add_random_slots(const Scan& scan, c10::SmallVectorImpl<ir::ScalarValue>& slots) {
  at::Generator generator = scan.generator ? *scan.generator : default_generator(scan.device);
  auto [seed, ordinal] = at::check_generator<Generator>(generator)->draw();
  slots.push_back({.i = static_cast<int64_t>(seed)});
  slots.push_back({.i = static_cast<int64_t>(ordinal)});
  return {generator.getIntrusivePtr(), seed, ordinal, ordinal + 1};
}

// Sets the geometry of written tensors (out= tensors are resized), which may make them grow into
// memory that is read.
void resize_written(const OpInfo& info, c10::ArrayRef<IValue> args, const Recipe& recipe,
                    const Scan& scan) {
  bool any = false;
  for (size_t i = 0; i < recipe.writes.size(); ++i) {
    const Recipe::Write& write = recipe.writes[i];
    if (!write.resized) continue;
    c10::TensorImpl& tensor = *scan.written[i];
    if (!write.silent) {
      // Warns.
      at::native::resize_output_check(at::Tensor(tensor_of(tensor)), write.geometry.sizes);
    }
    const size_t before = tensor.storage_offset() * tensor.itemsize();  // it stays where it is
    if (const size_t own = write.geometry.nbytes()) reserve_storage(tensor, before + own);
    tensor.set_sizes_and_strides(write.geometry.sizes, write.geometry.strides);
    any = true;
  }
  if (any) check_overlap(info, args, scan);
}

// The storages that take the operator's results, if each takes one as it is.
bool direct_results(const Recipe& recipe, const Scan& scan, c10::ArrayRef<at::TensorBase> fresh,
                    c10::SmallVectorImpl<graph::OneOperator::Result>& results) {
  for (size_t i = 0; i < fresh.size(); ++i) {
    if (recipe.fresh[i].output < 0) continue;
    results.push_back({&storage_of(*fresh[i].unsafeGetTensorImpl()),
                       static_cast<uint32_t>(recipe.fresh[i].output)});
  }
  for (size_t i = 0; i < recipe.writes.size(); ++i) {
    const Recipe::Write& write = recipe.writes[i];
    if (write.cast || write.resized || write.reshaped || write.in_list ||
        !is_whole(*scan.written[i]))
      return false;
    results.push_back({&storage_of(*scan.written[i]), write.output});
  }
  return true;
}

// Eager mode's path if there is nothing to record: the operands are data, and a program for the
// operator is known. Caller holds the mutex.
std::optional<graph::OneOperator> launch(const Recipe& recipe, const Scan& scan, uint64_t setting,
                                         c10::ArrayRef<Value> operands,
                                         c10::ArrayRef<at::TensorBase> fresh,
                                         const std::optional<ir::Draws>& draw,
                                         ir::Garbage& garbage) {
  for (const Value& operand : operands) {
    if (!operand.node->is_leaf()) return {};
  }
  c10::SmallVector<graph::OneOperator::Result, 4> results;
  if (!direct_results(recipe, scan, fresh, results)) return {};
  std::vector<ir::Draws> draws;
  if (draw) draws.push_back(*draw);
  return graph::OneOperator::prepare(recipe.spec, setting, operands, scan.slots, results,
                                     std::move(draws), scan.device, garbage);
}

// Whether it may be the optimizer's state that the call makes.
bool makes_state(const Recipe& recipe, const Scan& scan) {
  return scan.operands.empty() && !recipe.spec.random && record::in_optimizer_step() &&
         record::current_mode() != record::Mode::kEager;
}

// Whether a call that may make an optimizer's state is not to be part of the program.
bool is_apart(const Recipe& recipe, const Scan& scan, c10::ArrayRef<at::TensorBase> fresh) {
  if (record::is_temporary(recipe.spec)) return false;
  // A tensor made from a number is not the optimizer's state.
  if (!scan.slots.empty() && recipe.spec.outputs[0].numel() <= 1) return false;
  c10::SmallVector<graph::OneOperator::Result, 4> results;
  std::lock_guard lock(ir::device_mutex(scan.device));
  return direct_results(recipe, scan, fresh, results);
}

// Makes the node and hands its outputs to the fresh and the written tensors.
void add_node(const RecipeRef& made_by, const Scan& scan, c10::ArrayRef<Value> operands,
              c10::ArrayRef<at::TensorBase> fresh, ir::PendingSet& pending, ir::Garbage& garbage) {
  const Recipe& recipe = *made_by;
  ir::NodePtr node = ir::Node::make(&recipe.spec, operands, scan.slots, made_by);
  for (size_t i = 0; i < fresh.size(); ++i) {
    int output = recipe.fresh[i].output;
    if (output < 0) continue;
    write(*fresh[i].unsafeGetTensorImpl(), {node, static_cast<uint32_t>(output)}, pending, garbage);
  }
  for (size_t i = 0; i < recipe.writes.size(); ++i) {
    Value value{node, recipe.writes[i].output};
    const c10::TensorImpl& target = *scan.written[i];
    if (recipe.writes[i].cast) {
      value = cast(std::move(value), c10::typeMetaToScalarType(target.dtype()));
    }
    if (recipe.writes[i].reshaped) value = reshape(std::move(value), target.sizes());
    write(target, std::move(value), pending, garbage);
    // PyTorch's list operators leave this to their kernels.
    if (recipe.writes[i].in_list) scan.written[i]->bump_version();
  }
}

// Records the call, or in eager mode runs it.
void apply(const RecipeRef& made_by, Scan& scan, c10::ArrayRef<at::TensorBase> fresh) {
  const Recipe& recipe = *made_by;
  settle(scan);
  const bool may_be_state = makes_state(recipe, scan);
  if (may_be_state) {
    for (const at::TensorBase& made : fresh) {
      if (made.defined()) record::watch_until_step_ends(*made.unsafeGetTensorImpl(), recipe.spec);
    }
    for (const c10::TensorImpl* made : scan.written) {
      record::watch_until_step_ends(*made, recipe.spec);
    }
  }
  if (may_be_state && is_apart(recipe, scan, fresh)) {
    ++Counters::get().nodes_recorded;
    return record::run_apart(scan.device, [&](ir::PendingSet& pending, ir::Garbage& garbage) {
      add_node(made_by, scan, {}, fresh, pending, garbage);
    });
  }
  std::optional<ir::Draws> draw;
  if (recipe.spec.random) draw = add_random_slots(scan, scan.slots);
  // No program of its own if nothing is to run.
  const bool eager =
      record::current_mode() == record::Mode::kEager && record::Capture::current() == nullptr;
  const uint64_t setting = eager ? record::current_options() : 0;
  c10::DeviceIndex device = scan.device;
  std::optional<graph::OneOperator> launched;
  {
    ir::Garbage garbage;  // dropped after the mutex
    c10::SmallVector<Value, 8> operands;
    ir::PendingSet& pending = record::pending_set(device);
    std::lock_guard lock(ir::device_mutex(device));
    for (const c10::TensorImpl* tensor : scan.operands) operands.push_back(read(*tensor, pending));
    if (eager) launched = launch(recipe, scan, setting, operands, fresh, draw, garbage);
    if (!launched) {
      add_node(made_by, scan, operands, fresh, pending, garbage);
      if (draw) pending.note_draw(draw->generator, draw->seed, draw->first);
      if (recipe.spec.collective) pending.has_collectives = true;
      ++pending.nodes_recorded;
    }
  }
  ++Counters::get().nodes_recorded;
  if (launched) {
    launched->run(scan.slots);
  } else {
    after_recording(device, recipe.spec.id);
  }
}

// What a recorded call returns: fresh tensors, and arguments that it wrote.
struct Results {
  RecipeRef recipe;
  c10::SmallVector<at::TensorBase, 4> fresh;

  at::Tensor take(const Recipe::Return& ret, uint32_t which = 0) {
    return at::Tensor(std::move(fresh[ret.first_fresh + which]));
  }
};

void push_results(const OpInfo& info, Results made, torch::jit::Stack* stack) {
  size_t num_args = info.args.size();
  size_t first_arg = stack->size() - num_args;
  c10::SmallVector<IValue, 4> results;
  for (const Recipe::Return& ret : made.recipe->returns) {
    if (ret.argument >= 0) {
      results.push_back((*stack)[first_arg + ret.argument]);
    } else if (ret.is_list) {
      c10::List<at::Tensor> list;
      list.reserve(ret.count);
      for (uint32_t i = 0; i < ret.count; ++i) list.push_back(made.take(ret, i));
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(made.take(ret));
    }
  }
  torch::jit::drop(*stack, num_args);
  for (IValue& result : results) stack->push_back(std::move(result));
}

// Why the call cannot be recorded; null if it was.
const char* try_record(const OpInfo& info, c10::ArrayRef<IValue> args, Results& results) {
  const auto capture = record::Capture::current();
  const LoweringKind kind =
      info.recordable ? lowering_kind_of(info, capture.get()) : LoweringKind::kHost;
  if (kind == LoweringKind::kHost) return "has no lowering";
  check_deterministic(info, args);
  if (options().check_indices && info.checks.of_values) info.checks.of_values(info, args, {});
  ScanScope scope;
  Scan& scan = *scope;
  scan.run(info, args);
  if (!scan.written.empty() && !check_overlap(info, args, scan)) {
    torch::jit::Stack stack(args.begin(), args.end());
    info.handle.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, stack);
    results.recipe = std::make_shared<Recipe>();  // it returns nothing
    return nullptr;
  }
  // Where a call runs is part of its recipe, and depends on the platform. The numbers stay last.
  if (capture) {
    scan.key.insert(scan.key.end() - scan.numbers_in_key,
                    std::hash<std::string>()(capture->platform()));
  }
  const RecipeRef recipe = find_recipe(info, kind, args, scan);
  if (!recipe) return "has no meta function, which would tell its result's shape,";
  if (recipe->runs == Recipe::Runs::kHost) return "has no lowering for such arguments";
  if (recipe->runs == Recipe::Runs::kHostCall) check_host_call_allowed(info, args);
  resize_written(info, args, *recipe, scan);
  results.recipe = recipe;
  for (const Recipe::Fresh& result : recipe->fresh) {
    results.fresh.push_back(result.output < 0
                                ? at::TensorBase()
                                : make_tensor(result.geometry, result.nbytes, scan.device));
  }
  if (recipe->runs != Recipe::Runs::kNowhere) apply(recipe, scan, results.fresh);
  return nullptr;
}

}  // namespace

void after_recording(c10::DeviceIndex device, uint64_t op) {
  const record::Mode mode = record::current_mode();
  if (mode == record::Mode::kEager ||
      (mode == record::Mode::kFused && record::batch_ends(record::pending_set(device), op))) {
    record::flush(device, record::Cause::kMode);
    return;
  }
  auto bound = static_cast<size_t>(options().max_pending_nodes);
  if (record::pending_set(device).nodes_recorded > bound) {
    record::flush(device, record::Cause::kLimit);
  }
}

void record(const OpInfo& info, torch::jit::Stack* stack) {
  Results results;
  if (const char* why = try_record(info, torch::jit::last(*stack, info.args.size()), results)) {
    run_on_host(info, stack, why);
  } else {
    push_results(info, std::move(results), stack);
  }
}

at::Tensor record(const OpInfo& info, c10::ArrayRef<IValue> args) {
  Results results;
  if (const char* why = try_record(info, args, results)) {
    torch::jit::Stack stack(args.begin(), args.end());
    run_on_host(info, &stack, why);
    return std::move(stack.back()).toTensor();
  }
  const Recipe::Return& ret = results.recipe->returns[0];
  return ret.argument < 0 ? results.take(ret) : at::Tensor();
}

}  // namespace lazyxla::dispatch
