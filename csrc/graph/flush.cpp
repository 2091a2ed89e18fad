#include "graph/flush.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "graph/capture.h"
#include "graph/counters.h"
#include "graph/execute.h"
#include "graph/gil.h"
#include "graph/missed.h"
#include "graph/one_operator.h"
#include "graph/partitioned_run.h"
#include "graph/parts.h"
#include "graph/recording.h"
#include "graph/settings.h"
#include "graph/shards.h"
#include "graph/tape.h"
#include "options.h"
#include "pjrt/client.h"
#include "pjrt/fork.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {

namespace {

// A graph in the memory of the thread's last one: what a flush allocates above a KiB has malloc put
// together all that was freed before.
class ReusedGraph {
 public:
  ReusedGraph() : graph(std::move(spare_)) {}
  ~ReusedGraph() {
    graph.clear();
    if (graph.key.capacity() <= kMostWords) spare_ = std::move(graph);
  }
  ReusedGraph(const ReusedGraph&) = delete;
  ReusedGraph& operator=(const ReusedGraph&) = delete;

  Graph graph;

 private:
  static constexpr size_t kMostWords = size_t{1} << 17;
  static thread_local Graph spare_;
};
thread_local Graph ReusedGraph::spare_;

thread_local std::optional<std::vector<uint64_t>> trace;

// A training step is sure to come again; what is computed without gradients may not.
OnHost may_run_on_host() {
  return c10::GradMode::is_enabled() ? OnHost::kSmall : OnHost::kFirstRuns;
}

}  // namespace

void flush(c10::DeviceIndex device, Cause cause) {
  pjrt::check_not_forked();  // before a slot is taken: a child has no thread that it could wait for
  ir::PendingSet& mine = pending_set(device);
  ir::PendingSet& shared = Recording::shared().pending(device);
  {
    std::lock_guard lock(ir::device_mutex(device));
    if (shared.first && &shared != &mine) mine.adopt_all(shared);
    if (!mine.first) return;
  }
  flush(mine, cause);
}

void flush(ir::PendingSet& pending, Cause cause) {
  const c10::DeviceIndex device = pending.device;
  TORCH_CHECK(!on_worker(),
              "lazyxla: a lowering rule computes with tensors of the device; it must build the "
              "computation into the program instead");
  check_unbroken(cause);  // may ask Python for the user's line: not under the mutex
  const auto capture = Capture::current();
  ReusedGraph reused;
  std::optional<ExecutionSlot> slot;
  const bool divisible = !capture && !in_region() && cause != Cause::kRegionEnd;
  if (!detach(pending, current_options(), reused.graph, [&] {
        if (!capture) slot = ExecutionSlot::take(device);
      })) {
    return;
  }
  if (capture) {
    capture->take(reused.graph);
    return;
  }
  ++Counters::get().flushes;
  if (std::vector<Graph> graphs; divisible && !(graphs = split(reused.graph)).empty()) {
    for (const Graph& graph : graphs) {
      if (trace) trace->push_back(graph.hash);
    }
    std::vector<ExecutionSlot> execution_slots = std::move(*slot).divide(graphs.size());
    Parts parts(pending, std::move(graphs), std::move(execution_slots));
    parts.make();
    parts.run();
    return;
  }
  if (trace) trace->push_back(reused.graph.hash);
  const bool partitioned = reused.graph.partition != nullptr;
  // Who asks for a result waits for its program; the modes that run operators by themselves do not.
  // How a program for many devices spreads its results must be known before they are read.
  const bool later = cause == Cause::kMode && !options().blocking && !partitioned;
  const auto program = find_program(reused.graph);
  VariantRef variant = program->find(reused.graph);
  std::shared_ptr<Missed> missed;
  if (!variant) {
    missed = std::make_shared<Missed>(std::move(reused.graph));
    const bool apart = cause == Cause::kApart;
    const bool is_free = divisible && !apart && current_mode() == Mode::kLazy;
    const Origin origin{.line = user_line(),
                        .scope = apart ? nullptr : current_scope(),
                        .may_cut = is_free,
                        .on_host = is_free ? may_run_on_host() : OnHost::kNone};
    variant = make_program(pending, program, missed, later ? Compile::kInBackground : Compile::kNow,
                           origin, *slot, replaces(missed->graph));
  }
  Graph& graph = missed ? missed->graph : reused.graph;
  if (Tape* tape = Tape::current()) [[unlikely]]
    tape->take(graph, variant);
  std::vector<Replaced> replaced = replaced_by(graph);
  graph.taken.clear();  // what it alone keeps alive goes, so that memory can be given away
  if (!variant->runs_on_host() && !partitioned) OneOperator::keep(graph, variant);
  c10::SmallVector<BufferRef, 128> inputs;
  list_inputs(graph, inputs);
  const Run run{inputs, graph.donated, graph.slots, graph.promises, replaced, graph.draws};
  if (later) {
    slot->run_soon(variant, run);
  } else {
    slot->run_now(variant, run);
  }
}

void run_apart(c10::DeviceIndex device,
               c10::function_ref<void(ir::PendingSet&, ir::Garbage&)> record) {
  Recording& recording = Recording::current();
  ir::PendingSet apart(device, recording.regions);
  struct Leave {  // what cannot be run stays pending
    ~Leave() {
      std::lock_guard lock(ir::device_mutex(from.device));
      to.adopt_all(from);
    }
    ir::PendingSet &from, &to;
  } leave{apart, recording.pending(device)};
  {
    ir::Garbage garbage;  // dropped after the mutex
    std::lock_guard lock(ir::device_mutex(device));
    record(apart, garbage);
  }
  flush(apart, Cause::kApart);
}

void trace_keys() { trace.emplace(); }

std::vector<uint64_t> traced_keys() {
  std::vector<uint64_t> keys = trace.value_or(std::vector<uint64_t>());
  trace.reset();
  return keys;
}

Mark::Mark(c10::DeviceIndex device)
    : device_(device), recording_(Recording::current().shared_from_this()) {
  ir::PendingSet& pending = recording_->pending(device);
  std::lock_guard lock(ir::device_mutex(device));
  flushes_ = pending.flushes;
}

void Mark::reach() {
  if (!recording_) return;
  ir::PendingSet& pending = recording_->pending(device_);
  bool is_pending;
  {
    std::lock_guard lock(ir::device_mutex(device_));
    is_pending = pending.flushes == flushes_ && pending.regions == 0;
  }
  if (is_pending) flush(pending, Cause::kSync);
  finish_waiting_runs(device_);
  wait_for(device_);
  recording_.reset();
}

void sync(c10::DeviceIndex device, bool wait, Cause cause) {
  flush(device, cause);
  if (!wait) return;
  finish_waiting_runs(device);
  wait_for(device);
}

ir::Value upload(const void* data, const ir::TensorType& type, c10::DeviceIndex device) {
  if (Capture::current()) return make_abstract_leaf(type);
  ++Counters::get().uploads;
  const pjrt::Device& target = pjrt_device(device);
  std::vector<int64_t> dims(type.dims.begin(), type.dims.end());
  try {
    return make_leaf(type, pjrt::Runtime::get().client().buffer_from_host(
                               data, pjrt_type(type.dtype), dims, {}, target));
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to the device");
  }
}

ir::Value upload(const void* data, const ir::TensorType& type, const ir::Sharding& sharding) {
  if (Capture::current()) return make_abstract_leaf(type, &sharding);
  ++Counters::get().uploads;
  try {
    return make_leaf(type, upload_shards(data, type, sharding));
  } catch (const pjrt::Error& e) {
    rethrow(e, "copying to the devices");
  }
}

ir::Value copy_to_device(const ir::Value& leaf, c10::DeviceIndex device) {
  if (Capture::current()) return make_abstract_leaf(leaf.type());
  if (buffer_of(*leaf.node.get()).shards()) {
    std::vector<char> host(leaf.type().nbytes());
    download(leaf, host.data());
    return upload(host.data(), leaf.type(), device);
  }
  return make_leaf(leaf.type(),
                   buffer_of(*leaf.node.get()).get().copy_to_device(pjrt_device(device)));
}

void download(const ir::Value& leaf, void* destination) {
  ++Counters::get().downloads;
  WithoutGil no_gil;
  if (const Shards* shards = buffer_of(*leaf.node.get()).shards()) {
    try {
      return download_shards(*shards, leaf.type(), destination);
    } catch (const pjrt::Error& e) {
      const auto failure = take_failure_of(shards->sharding->mesh());
      rethrow(failure ? *failure : e, "reading a value");
    }
  }
  pjrt::Buffer& buffer = buffer_of(*leaf.node.get()).get();
  try {
    buffer.to_host(destination, leaf.type().nbytes());
  } catch (const pjrt::Error& e) {
    // Its program's failure is told with this, and the storages have what they had before.
    const auto failure =
        pjrt_device(static_cast<c10::DeviceIndex>(buffer.device_index())).take_failure();
    rethrow(failure ? *failure : e, "reading a value");
  }
}

}  // namespace lazyxla::graph
