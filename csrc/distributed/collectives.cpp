#include "distributed/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "common/gil.h"
#include "common/locks.h"
#include "common/user_line.h"
#include "dispatch/plain_call.h"
#include "dispatch/tensor.h"
#include "distributed/group.h"
#include "graph/devices.h"
#include "program/buffer.h"
#include "program/mesh_devices.h"
#include "program/replicas.h"
#include "record/flush.h"
#include "record/scope.h"

namespace lazyxla::distributed {
namespace {

using Tensors = std::vector<at::Tensor>;

// The tokens of the devices, whose threads may record in any order.
class Tokens {
 public:
  static Tokens& get() {
    static auto* instance = new Tokens();
    return *instance;
  }

  // Calls `record` on the inputs and the token, and its turn, keeps the token that it returns, and
  // returns the other results.
  Tensors pass(const Tensors& inputs, c10::function_ref<Tensors(const Tensors&, int64_t)> record) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    WithoutGil no_gil;  // not all of c10d's bindings release it
    const c10::Device device = inputs.at(0).device();
    finish_other(device);
    auto& [mutex, token, calls] = of(device);
    std::lock_guard lock(mutex);  // in eager mode it waits for other processes
    const int64_t turn = first_turn(device.index()) + calls;
    if (!token.defined() || is_lost(token)) {
      token = at::full({}, turn, at::kLong).to(device);  // uploaded: an input of programs
    }
    Tensors all = inputs;
    all.push_back(token);
    Tensors results = record(all, turn);
    token = std::move(results.back());
    results.pop_back();
    ++calls;
    return results;
  }

  // Starts the recorded calls.
  void run_recorded() {
    std::vector<std::pair<c10::Device, Token*>> tokens;
    {
      const auto all = all_.hold();
      for (auto& [device, token] : all->tokens) tokens.emplace_back(device, &token);
    }
    for (const auto& [device, token] : tokens) {
      at::Tensor last;
      {
        std::unique_lock lock(token->mutex, std::try_to_lock);
        if (!lock) continue;  // another thread is recording one, and will run it
        last = token->value;
      }
      if (last.defined() && take_over(last)) record::flush(device.index(), record::Cause::kSync);
    }
  }

 private:
  struct Token {
    OrderedMutex mutex;
    at::Tensor value;
    int64_t calls = 0;  // that were recorded
  };
  struct All {
    std::unordered_map<c10::Device, Token> tokens;  // whose addresses are stable
    std::optional<c10::Device> last;                // that recorded a collective
  };

  // Collectives run in the order in which they were recorded, also on different devices of the
  // process.
  void finish_other(c10::Device device) {
    const std::optional<c10::Device> last = std::exchange(all_.hold()->last, device);
    if (last && *last != device) record::sync(last->index());
  }

  Token& of(c10::Device device) { return all_.hold()->tokens[device]; }

  // Whether the program that was to compute it failed.
  static bool is_lost(const at::Tensor& token) {
    const ir::Storage& storage = dispatch::storage_of(*token.unsafeGetTensorImpl());
    std::lock_guard lock(storage.mutex());
    const ir::Node& node = *storage.value().node.get();
    return node.is_leaf() && !program::buffer_of(node).is_usable();
  }

  // Makes what computes the token part of what this thread has recorded; false if it ran, or
  // belongs to a region of another thread.
  static bool take_over(const at::Tensor& token) {
    ir::Storage& storage = dispatch::storage_of(*token.unsafeGetTensorImpl());
    ir::PendingSet& mine = record::pending_set(token.device().index());
    std::lock_guard lock(storage.mutex());
    const ir::PendingSet* theirs = storage.pending_set();
    if (!theirs || (theirs != &mine && theirs->regions != 0)) return false;
    record::take_over_pending(storage, mine);
    return true;
  }

  Guarded<All> all_;
};

constexpr bool kOfAll = true, kOfTwo = false;

// `of_all`: all processes of the group call it, not two of them. `what` is what they must agree on.
template <typename... Args>
Tensors record(const char* name, bool of_all, std::string what, const Tensors& inputs,
               const std::string& group, Args... args) {
  const auto op = dispatch::operator_named<Tensors(at::TensorList, std::string, Args...)>(name);
  TORCH_CHECK_NOT_IMPLEMENTED(
      inputs.at(0).device().index() == 0 || !program::collectives_are_programs(),
      "lazyxla: torch.distributed's collectives are between the processes' first devices, and the "
      "tensor is on ",
      inputs[0].device(), "; lazyxla.Mesh makes use of all of them");
  std::string line = user_line();
  return Tokens::get().pass(inputs, [&](const Tensors& all, int64_t turn) {
    find_group(group)->note(turn, of_all, std::move(what), std::move(line));
    return op.call(all, group, args...);
  });
}

const char* name_of(int64_t op) {
  constexpr const char* kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                    "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  return kNames[op];
}

// "float32[2, 3], int64[4]"
std::string types(at::TensorList tensors) {
  std::string text;
  for (const at::Tensor& x : tensors) {
    text +=
        c10::str(text.empty() ? "" : ", ", c10::getDtypeNames(x.scalar_type()).first, x.sizes());
  }
  return text;
}

}  // namespace

Tensors all_reduce(const Tensors& inputs, const std::string& group, c10d::ReduceOp::RedOpType op) {
  return record("lazyxla_c10d::all_reduce", kOfAll,
                c10::str("all_reduce(", name_of(op), ") of ", types(inputs)), inputs, group,
                static_cast<int64_t>(op));
}

Tensors broadcast(const Tensors& inputs, const std::string& group, int64_t root) {
  return record("lazyxla_c10d::broadcast", kOfAll,
                c10::str("broadcast(from ", root, ") of ", types(inputs)), inputs, group, root);
}

Tensors all_gather(const Tensors& inputs, const std::string& group, int64_t processes) {
  return record("lazyxla_c10d::all_gather", kOfAll, "all_gather of " + types(inputs), inputs, group,
                processes);
}

Tensors reduce_scatter(const Tensors& inputs, const std::string& group,
                       c10d::ReduceOp::RedOpType op) {
  return record("lazyxla_c10d::reduce_scatter", kOfAll,
                c10::str("reduce_scatter(", name_of(op), ") of ", types(inputs)), inputs, group,
                static_cast<int64_t>(op));
}

at::Tensor all_to_all(const at::Tensor& input, const std::string& group,
                      const std::vector<int64_t>& sent_rows,
                      const std::vector<int64_t>& received_rows, bool even) {
  std::string what =
      c10::str("all_to_all of ", c10::getDtypeNames(input.scalar_type()).first, " rows of ",
               input.sizes().slice(1), ", ",
               even ? c10::str(sent_rows[0], " for each") : "split by sizes of each process's own");
  return record("lazyxla_c10d::all_to_all", kOfAll, std::move(what), {input}, group,
                c10::IntArrayRef(sent_rows), c10::IntArrayRef(received_rows), even)[0];
}

void send(const at::Tensor& input, const std::string& group, int64_t peer, int64_t tag) {
  record("lazyxla_c10d::send", kOfTwo, c10::str("send(to ", peer, ") of ", types(input)), {input},
         group, peer, tag);
}

void start_receive(const at::Tensor& like, const std::string& group, int64_t peer, int64_t tag) {
  record("lazyxla_c10d::start_receive", kOfTwo, c10::str("recv(from ", peer, ") of ", types(like)),
         {like}, group, peer, tag);
}

at::Tensor finish_receive(const at::Tensor& like, const std::string& group, int64_t peer,
                          int64_t tag) {
  return record("lazyxla_c10d::finish_receive", kOfTwo,
                c10::str("recv(from ", peer, ") of ", types(like)), {like}, group, peer, tag)[0];
}

namespace {

// Starts what the devices have recorded, if a collective is in it, or it may be for the devices of
// several processes.
void run_recorded_collectives() {
  Tokens::get().run_recorded();
  if (!ir::Mesh::any() || !program::client_spans_processes()) return;
  for (c10::DeviceIndex device = 0; device < graph::device_count_bound(); ++device) {
    record::flush(device, record::Cause::kSync);
  }
}

// Reached by every call, on any device, and in inference mode, too.
constexpr c10::DispatchKey kKey = c10::DispatchKey::BackendSelect;

void run_recorded_first(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                        torch::jit::Stack* stack) {
  if (!keys.has(c10::DispatchKey::PrivateUse1)) run_recorded_collectives();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

}  // namespace

void run_recorded_before_host_collectives() {
  static const torch::Library* const library = [] {
    auto* hooks = new torch::Library(torch::Library::IMPL, "c10d", kKey, __FILE__, __LINE__);
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.getNamespace() != "c10d") continue;
      hooks->impl(toString(name).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&run_recorded_first>());
    }
    return hooks;
  }();
  (void)library;
}

}  // namespace lazyxla::distributed
