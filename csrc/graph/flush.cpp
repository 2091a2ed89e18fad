#include "graph/flush.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/Exception.h>

#include "graph/capture.h"
#include "graph/counters.h"
#include "graph/execute.h"
#include "graph/gil.h"
#include "graph/one_operator.h"
#include "graph/program.h"
#include "graph/runner.h"
#include "options.h"
#include "pjrt/client.h"
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

}  // namespace

uint64_t global_setting() {
  return (static_cast<uint64_t>(at::globalContext().float32MatmulPrecision()) << 8) |
         static_cast<uint64_t>(c10::get_default_dtype_as_scalartype());
}

void flush(c10::DeviceIndex device, Cause cause) {
  ir::PendingSet& pending = ir::PendingSet::of(device);
  {
    std::lock_guard lock(pending.mutex);
    if (!pending.first) return;
  }
  check_unbroken(cause);  // may ask Python for the user's line: not under the mutex
  const uint64_t setting = global_setting();
  LoweringScope scope;
  const auto capture = Capture::current();
  Graph graph;
  std::optional<Turn> turn;
  {
    std::lock_guard lock(pending.mutex);
    if (!pending.first) return;
    graph = detach(pending, setting);
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
  std::vector<BufferRef> inputs;
  inputs.reserve(graph.leaves.size());
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
