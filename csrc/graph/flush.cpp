#include "graph/flush.h"

#include <c10/util/Exception.h>

#include "graph/capture.h"
#include "graph/counters.h"
#include "graph/execute.h"
#include "graph/gil.h"
#include "graph/one_operator.h"
#include "graph/program.h"
#include "graph/recording.h"
#include "graph/runner.h"
#include "graph/setting.h"
#include "graph/workers.h"
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

// What the storages had before the graph, where they had something. Taken out of the graph.
std::vector<Replaced> replaced_by(Graph& graph) {
  std::vector<Replaced> replaced;
  for (Taken& taken : graph.taken) {
    if (!taken.committed) continue;
    replaced.push_back({taken.id, std::move(taken.committed), graph.promises[taken.output]});
  }
  return replaced;
}

// Undoes that.
void give_back(Graph& graph, std::vector<Replaced>& replaced) {
  auto next = replaced.begin();
  for (Taken& taken : graph.taken) {
    if (next == replaced.end()) break;
    if (next->id == taken.id) taken.committed = std::move(next++->content);
  }
  replaced.clear();
}

// Per value of the graph, whether it depends on node `failed`.
std::vector<bool> dependents(const Graph& graph, size_t failed) {
  std::vector<bool> tainted(graph.leaves.size(), false);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    bool depends = i == failed;
    for (size_t j = 0; j < graph.nodes[i]->operands().size(); ++j) {
      depends = depends || tainted[graph.operand(i, j)];
    }
    tainted.insert(tainted.end(), graph.nodes[i]->spec()->outputs.size(), depends);
  }
  return tainted;
}

// Makes those storages pending again that hold what they were promised and do not depend on node
// `failed`.
void make_pending_again(ir::PendingSet& pending, Graph& graph, size_t failed) {
  const std::vector<bool> tainted = dependents(graph, failed);
  ir::Garbage garbage;
  std::lock_guard lock(ir::device_mutex(pending.device));
  const auto alive = ir::Storage::alive();
  for (Taken& taken : graph.taken) {
    const auto found = alive.find(taken.id);
    if (tainted[graph.outputs[taken.output]] || found == alive.end()) continue;
    ir::Storage& storage = *found->second;
    const bool is_held =
        storage.value() && storage.value().node->leaf_data() == graph.promises[taken.output];
    if (!is_held) continue;
    storage.make_pending(std::move(taken.value), std::move(taken.committed), pending, garbage);
  }
  pending.draws.insert(pending.draws.begin(), std::make_move_iterator(graph.draws.begin()),
                       std::make_move_iterator(graph.draws.end()));
  graph.draws.clear();
}

void list_inputs(const Graph& graph, c10::SmallVectorImpl<BufferRef>& inputs) {
  for (const ir::NodePtr& leaf : graph.leaves) inputs.push_back(buffer_ref(*leaf.get()));
}

// A graph whose program is not known yet: what its run takes, which outlives the flush.
struct Missed {
  explicit Missed(Graph&& missed) : graph(std::move(missed)) { list_inputs(graph, inputs); }
  Run run(std::vector<Replaced>& replaced) const {
    return {inputs, graph.donated, graph.slots, graph.promises, replaced, graph.draws};
  }
  Graph graph;
  c10::SmallVector<BufferRef, 0> inputs;
};

std::shared_ptr<const Outcome<VariantRef>> start_making(const std::shared_ptr<Program>& program,
                                                        const std::shared_ptr<Missed>& missed,
                                                        Compile how, const Origin& origin) {
  return start_on_worker<VariantRef>([=] { return program->variant(missed->graph, how, origin); });
}

// Has the program made by a worker, and waits for it. What is interrupted is left to the runner.
VariantRef make_program(ir::PendingSet& pending, const std::shared_ptr<Program>& program,
                        const std::shared_ptr<Missed>& missed, Compile how, Turn& turn) {
  Graph& graph = missed->graph;
  std::shared_ptr<const Outcome<VariantRef>> made;
  try {
    made = start_making(program, missed, how, {user_line(), current_scope()});
    made->wait();
  } catch (const std::exception&) {
    std::vector<Replaced> replaced = replaced_by(graph);
    const Run run = missed->run(replaced);
    if (!made) {  // no thread could be started
      keeping(run, pending.device, [] { throw; });
    }
    turn.run_when_found([missed, made] { return made->get(); }, run);
    throw;
  }
  std::vector<Replaced> replaced = replaced_by(graph);
  const Run run = missed->run(replaced);
  VariantRef variant;
  keeping(run, pending.device, [&] {
    try {
      variant = made->get();
    } catch (const LoweringFailure& e) {
      if (replaced.empty()) make_pending_again(pending, graph, e.node);
      TORCH_CHECK_NOT_IMPLEMENTED(false, e.what());
    } catch (const TooManyPrograms& e) {
      give_back(graph, replaced);
      make_pending_again(pending, graph, graph.nodes.size());
      TORCH_CHECK(false, e.what());
    }
  });
  give_back(graph, replaced);
  return variant;
}

// The programs of a graph that was taken apart. None runs before all are made: if making one fails,
// all of the graph is undone.
class Parts {
 public:
  Parts(ir::PendingSet& pending, std::vector<Graph> graphs, std::vector<Turn> turns)
      : pending_(pending), origin_{user_line(), current_scope()} {
    for (size_t i = 0; i < graphs.size(); ++i) {
      auto program = find_program(graphs[i]);
      parts_.push_back({std::move(turns[i]), std::move(program),
                        std::make_shared<Missed>(std::move(graphs[i])), nullptr});
    }
  }

  void make() {
    for (Part& part : parts_) {
      try {
        part.variant = part.program->find(part.missed->graph);
        if (part.variant) continue;
        part.variant = make_program(pending_, part.program, part.missed, Compile::kNow, part.turn);
      } catch (const std::exception&) {
        if (part.turn.is_used()) {
          leave_others(part);  // interrupted
        } else {
          fail_others(part, std::current_exception());
        }
        throw;
      }
    }
  }

  // All of them, whatever becomes of some; throws the first failure.
  void run() {
    std::exception_ptr failure;
    for (Part& part : parts_) {
      Turn turn = std::move(part.turn);  // ends with the run
      try {
        std::vector<Replaced> replaced = let_go(part);
        turn.run_now(part.variant, part.missed->run(replaced));
      } catch (const std::exception&) {
        if (!failure) failure = std::current_exception();
        if (!turn.is_used()) continue;
        leave_others(part);
        break;
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

 private:
  struct Part {
    Turn turn;
    std::shared_ptr<Program> program;
    std::shared_ptr<Missed> missed;
    VariantRef variant;
    bool over = false;  // run, or undone
  };

  // What the storages had before. What only the graph keeps alive goes, so that memory can be given
  // away.
  static std::vector<Replaced> let_go(Part& part) {
    part.over = true;
    std::vector<Replaced> replaced = replaced_by(part.missed->graph);
    part.missed->graph.taken.clear();
    return replaced;
  }

  void leave_others(const Part& left) {
    for (Part& part : parts_) {
      if (&part == &left || part.over) continue;
      std::vector<Replaced> replaced = let_go(part);
      part.turn.run_when_found(
          [variant = part.variant, program = part.program, missed = part.missed, origin = origin_] {
            if (variant) return variant;
            return start_making(program, missed, Compile::kNow, origin)->get();
          },
          part.missed->run(replaced));
    }
  }

  void fail_others(const Part& failed, const std::exception_ptr& reason) {
    for (Part& part : parts_) {
      if (&part == &failed || part.over) continue;
      std::vector<Replaced> replaced = replaced_by(part.missed->graph);
      if (replaced.empty()) {
        make_pending_again(pending_, part.missed->graph, part.missed->graph.nodes.size());
        continue;
      }
      try {
        keeping(part.missed->run(replaced), pending_.device,
                [&] { std::rethrow_exception(reason); });
      } catch (const std::exception&) {
        // it is told for the part that failed
      }
    }
  }

  ir::PendingSet& pending_;
  const Origin origin_;
  std::vector<Part> parts_;
};

}  // namespace

void flush(c10::DeviceIndex device, Cause cause) {
  pjrt::check_not_forked();  // before a turn is taken: a child has no thread that it could wait for
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
  std::optional<Turn> turn;
  std::vector<Turn> more_turns;
  const bool divisible = !capture && !in_region() && cause != Cause::kRegionEnd;
  if (!detach(pending, current_setting(), reused.graph, [&] {
        if (capture) return;
        turn = Turn::take(device);
        const size_t outputs = reused.graph.promises.size();
        if (!divisible || outputs <= kManyOutputs) return;
        for (size_t i = 0; i < outputs / kPartOutputs; ++i)
          more_turns.push_back(Turn::take(device));
      })) {
    return;
  }
  if (capture) {
    capture->take(reused.graph);
    return;
  }
  ++Counters::get().flushes;
  if (!more_turns.empty()) {
    if (std::vector<Graph> graphs = split(reused.graph); !graphs.empty()) {
      more_turns.insert(more_turns.begin(), *std::exchange(turn, std::nullopt));
      for (const Graph& graph : graphs) {
        if (trace) trace->push_back(graph.hash);
      }
      Parts parts(pending, std::move(graphs), std::move(more_turns));
      parts.make();
      parts.run();
      return;
    }
    more_turns.clear();
  }
  if (trace) trace->push_back(reused.graph.hash);
  // Who asks for a result waits for its program; the modes that run operators by themselves do not.
  const bool later = cause == Cause::kMode && !options().blocking;
  const auto program = find_program(reused.graph);
  VariantRef variant = program->find(reused.graph);
  std::shared_ptr<Missed> missed;
  if (!variant) {
    missed = std::make_shared<Missed>(std::move(reused.graph));
    variant = make_program(pending, program, missed, later ? Compile::kInBackground : Compile::kNow,
                           *turn);
  }
  Graph& graph = missed ? missed->graph : reused.graph;
  std::vector<Replaced> replaced = replaced_by(graph);
  graph.taken.clear();  // what it alone keeps alive goes, so that memory can be given away
  OneOperator::keep(graph, variant);
  c10::SmallVector<BufferRef, 128> inputs;
  list_inputs(graph, inputs);
  const Run run{inputs, graph.donated, graph.slots, graph.promises, replaced, graph.draws};
  if (later) {
    turn->run_soon(variant, run);
  } else {
    turn->run_now(variant, run);
  }
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

ir::Value copy_to_device(const ir::Value& leaf, c10::DeviceIndex device) {
  if (Capture::current()) return make_abstract_leaf(leaf.type());
  return make_leaf(leaf.type(),
                   buffer_of(*leaf.node.get()).get().copy_to_device(pjrt_device(device)));
}

void download(const ir::Value& leaf, void* destination) {
  ++Counters::get().downloads;
  WithoutGil no_gil;
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
