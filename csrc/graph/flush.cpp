#include "graph/flush.h"

#include <c10/util/Exception.h>

#include "graph/capture.h"
#include "graph/counters.h"
#include "graph/execute.h"
#include "graph/gil.h"
#include "graph/one_operator.h"
#include "graph/program.h"
#include "graph/runner.h"
#include "graph/setting.h"
#include "options.h"
#include "pjrt/client.h"
#include "pjrt/fork.h"
#include "pjrt/runtime.h"

namespace lazyxla::graph {

namespace {

// A flush from within a lowering would wait for the one that lowers.
class LoweringScope {
 public:
  LoweringScope() {
    TORCH_CHECK(!active_,
                "lazyxla: a lowering rule computes with tensors of the device; it must build the "
                "computation into the program instead");
    active_ = true;
  }
  ~LoweringScope() { active_ = false; }

 private:
  static thread_local bool active_;
};
thread_local bool LoweringScope::active_ = false;

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

}  // namespace

void flush(c10::DeviceIndex device, Cause cause) {
  pjrt::check_not_forked();  // before a turn is taken: a child has no thread that it could wait for
  ir::PendingSet& pending = ir::PendingSet::of(device);
  {
    std::lock_guard lock(pending.mutex);
    if (!pending.first) return;
  }
  check_unbroken(cause);  // may ask Python for the user's line: not under the mutex
  const uint64_t setting = current_setting();
  LoweringScope scope;
  const auto capture = Capture::current();
  ReusedGraph reused;
  Graph& graph = reused.graph;
  std::optional<Turn> turn;
  {
    std::lock_guard lock(pending.mutex);
    if (!pending.first) return;
    detach(pending, setting, graph);
    if (!capture) turn = Turn::take(device);
  }
  if (capture) {
    capture->take(graph);
    return;
  }
  ++Counters::get().flushes;
  // Who asks for a result waits for its program; the modes that run operators by themselves do not.
  const bool later = cause == Cause::kMode && !options().blocking;
  std::shared_ptr<const Variant> variant;
  keeping(graph.promises, [&] {
    try {
      variant = find_program(graph)->variant(graph, later ? Compile::kInBackground : Compile::kNow);
    } catch (const LoweringFailure& e) {
      restore(pending, graph, e.node);
      TORCH_CHECK_NOT_IMPLEMENTED(false, e.what());
    } catch (const TooManyPrograms& e) {
      restore(pending, graph, graph.nodes.size());
      TORCH_CHECK(false, e.what());
    }
  });
  graph.taken.clear();
  OneOperator::keep(graph, variant);
  c10::SmallVector<BufferRef, 128> inputs;
  for (const ir::NodePtr& leaf : graph.leaves) inputs.push_back(buffer_ref(*leaf.get()));
  const Run run{variant, inputs, graph.slots, graph.promises};
  if (later) {
    turn->run_soon(run);
  } else {
    turn->run_now(run);
  }
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
    rethrow(e, "reading a value");
  }
}

}  // namespace lazyxla::graph
