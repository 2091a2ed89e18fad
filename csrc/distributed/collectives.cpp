#include "distributed/collectives.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "dispatch/plain_call.h"
#include "dispatch/tensor.h"
#include "graph/buffer.h"

namespace lazyxla::distributed {
namespace {

using Tensors = std::vector<at::Tensor>;
using Transport = c10::intrusive_ptr<c10d::Backend>;

// ---- transports ----

// A transfer that goes on in the background, and its memory.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor data;
};

struct Group {
  Transport transport;
  std::mutex mutex;  // guards what follows
  std::deque<Transfer> sent;
  std::map<std::pair<int64_t, int64_t>, std::deque<Transfer>> started;  // by peer and tag
};

class Groups {
 public:
  static Groups& get() {
    static auto* instance = new Groups();
    return *instance;
  }
  void add(const std::string& name, Transport transport) {
    auto group = std::make_shared<Group>();
    group->transport = std::move(transport);
    std::lock_guard lock(mutex_);
    groups_[name] = std::move(group);
  }
  void remove(const std::string& name) {
    std::lock_guard lock(mutex_);
    groups_.erase(name);
  }
  std::shared_ptr<Group> find(const std::string& name) {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(name);
    TORCH_CHECK(found != groups_.end(), "lazyxla: the process group ", name,
                " was destroyed before this was run");
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Group>> groups_;
};

// ---- kernels, on the host's memory ----

at::Tensor flat(const at::Tensor& x) { return x.contiguous().view({-1}); }

// Without the token.
at::TensorList data_of(at::TensorList inputs) { return inputs.slice(0, inputs.size() - 1); }

// The results with the token behind them.
Tensors hand_on(Tensors results, at::TensorList inputs) {
  results.push_back(inputs.back().clone());
  return results;
}

// Starts a transfer from each input to its result, where there are elements, then waits for all.
template <typename Start>
void exchange(at::TensorList inputs, Tensors& results, Start&& start) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].numel() == 0) continue;
    at::Tensor source = flat(inputs[i]), target = results[i].view({-1});
    works.push_back(start(source, target));
  }
  for (const auto& work : works) work->wait();
}

// The same for transfers that replace what is in `results`.
template <typename Start>
Tensors exchange_in_place(at::TensorList inputs, Start&& start) {
  Tensors results;
  for (const at::Tensor& x : data_of(inputs)) {
    results.push_back(x.clone(at::MemoryFormat::Contiguous));
  }
  exchange(inputs, results, [&](at::Tensor&, at::Tensor& x) {
    Tensors one{x};
    return start(one);
  });
  return hand_on(std::move(results), inputs);
}

Tensors all_reduce_kernel(at::TensorList inputs, std::string name, int64_t op) {
  const auto group = Groups::get().find(name);
  c10d::AllreduceOptions options;
  options.reduceOp = static_cast<c10d::ReduceOp::RedOpType>(op);
  return exchange_in_place(inputs,
                           [&](Tensors& one) { return group->transport->allreduce(one, options); });
}

Tensors broadcast_kernel(at::TensorList inputs, std::string name, int64_t root) {
  const auto group = Groups::get().find(name);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return exchange_in_place(inputs,
                           [&](Tensors& one) { return group->transport->broadcast(one, options); });
}

std::vector<int64_t> with_front(int64_t size, c10::IntArrayRef sizes) {
  std::vector<int64_t> all{size};
  all.insert(all.end(), sizes.begin(), sizes.end());
  return all;
}

Tensors gathered(at::TensorList inputs, int64_t processes) {
  Tensors results;
  for (const at::Tensor& x : data_of(inputs)) {
    results.push_back(at::empty(with_front(processes, x.sizes()), x.options()));
  }
  return results;
}

Tensors all_gather_kernel(at::TensorList inputs, std::string name, int64_t processes) {
  const auto group = Groups::get().find(name);
  Tensors results = gathered(inputs, processes);
  exchange(inputs, results, [&](at::Tensor& source, at::Tensor& target) {
    return group->transport->_allgather_base(target, source);
  });
  return hand_on(std::move(results), inputs);
}

Tensors scattered(at::TensorList inputs) {
  Tensors results;
  for (const at::Tensor& x : data_of(inputs)) {
    results.push_back(at::empty(x.sizes().slice(1), x.options()));
  }
  return results;
}

Tensors reduce_scatter_kernel(at::TensorList inputs, std::string name, int64_t op) {
  const auto group = Groups::get().find(name);
  c10d::ReduceScatterOptions options;
  options.reduceOp = static_cast<c10d::ReduceOp::RedOpType>(op);
  Tensors results = scattered(inputs);
  exchange(inputs, results, [&](at::Tensor& source, at::Tensor& target) {
    return group->transport->_reduce_scatter_base(target, source, options);
  });
  return hand_on(std::move(results), inputs);
}

int64_t sum(c10::IntArrayRef numbers) {
  int64_t total = 0;
  for (const int64_t number : numbers) total += number;
  return total;
}

at::Tensor received(const at::Tensor& x, c10::IntArrayRef rows) {
  return at::empty(with_front(sum(rows), x.sizes().slice(1)), x.options());
}

Tensors all_to_all_kernel(at::TensorList inputs, std::string name, c10::IntArrayRef sent_rows,
                          c10::IntArrayRef received_rows) {
  const auto group = Groups::get().find(name);
  at::Tensor source = inputs[0].contiguous();
  at::Tensor result = received(source, received_rows);
  std::vector<int64_t> from = received_rows.vec(), to = sent_rows.vec();
  group->transport->alltoall_base(result, source, from, to)->wait();
  return {result, inputs.back().clone()};
}

Tensors send_kernel(at::TensorList inputs, std::string name, int64_t peer, int64_t tag) {
  const auto group = Groups::get().find(name);
  Transfer transfer{nullptr, flat(inputs[0].clone())};
  Tensors one{transfer.data};
  if (one[0].numel() > 0) {
    transfer.work = group->transport->send(one, static_cast<int>(peer), static_cast<int>(tag));
    std::lock_guard lock(group->mutex);
    while (!group->sent.empty() && group->sent.front().work->isCompleted()) {
      group->sent.pop_front();
    }
    group->sent.push_back(std::move(transfer));
  }
  return {inputs.back().clone()};
}

Tensors start_receive_kernel(at::TensorList inputs, std::string name, int64_t peer, int64_t tag) {
  const auto group = Groups::get().find(name);
  Transfer transfer{nullptr, at::empty({inputs[0].numel()}, inputs[0].options())};
  Tensors one{transfer.data};
  if (one[0].numel() > 0) {
    transfer.work = group->transport->recv(one, static_cast<int>(peer), static_cast<int>(tag));
    std::lock_guard lock(group->mutex);
    group->started[{peer, tag}].push_back(std::move(transfer));
  }
  return {inputs.back().clone()};
}

Tensors finish_receive_kernel(at::TensorList inputs, std::string name, int64_t peer, int64_t tag) {
  const auto group = Groups::get().find(name);
  at::Tensor result = at::empty_like(inputs[0], at::MemoryFormat::Contiguous);
  if (result.numel() > 0) {
    Transfer transfer;
    {
      std::lock_guard lock(group->mutex);
      auto& queue = group->started[{peer, tag}];
      TORCH_CHECK(!queue.empty(), "lazyxla: nothing was to be received from process ", peer);
      transfer = std::move(queue.front());
      queue.pop_front();
    }
    transfer.work->wait();
    result.view({-1}).copy_(transfer.data);
  }
  return {result, inputs.back().clone()};
}

// ---- shapes ----

Tensors alike(at::TensorList inputs) {
  Tensors results;
  for (const at::Tensor& x : inputs) {
    results.push_back(at::empty_like(x, at::MemoryFormat::Contiguous));
  }
  return results;
}

Tensors same_shapes(at::TensorList inputs, std::string, int64_t) { return alike(inputs); }

Tensors all_gather_shapes(at::TensorList inputs, std::string, int64_t processes) {
  return hand_on(gathered(inputs, processes), inputs);
}

Tensors reduce_scatter_shapes(at::TensorList inputs, std::string, int64_t) {
  return hand_on(scattered(inputs), inputs);
}

Tensors all_to_all_shapes(at::TensorList inputs, std::string, c10::IntArrayRef,
                          c10::IntArrayRef received_rows) {
  return {received(inputs[0], received_rows), at::empty_like(inputs.back())};
}

Tensors token_shape(at::TensorList inputs, std::string, int64_t, int64_t) {
  return {at::empty_like(inputs.back())};
}

Tensors finish_receive_shapes(at::TensorList inputs, std::string, int64_t, int64_t) {
  return alike(inputs);
}

TORCH_LIBRARY(lazyxla_c10d, m) {
  m.def("all_reduce(Tensor[] inputs, str group, int op) -> Tensor[]");
  m.def("broadcast(Tensor[] inputs, str group, int root) -> Tensor[]");
  m.def("all_gather(Tensor[] inputs, str group, int processes) -> Tensor[]");
  m.def("reduce_scatter(Tensor[] inputs, str group, int op) -> Tensor[]");
  m.def("all_to_all(Tensor[] inputs, str group, int[] sent_rows, int[] received_rows) -> Tensor[]");
  m.def("send(Tensor[] inputs, str group, int peer, int tag) -> Tensor[]");
  m.def("start_receive(Tensor[] inputs, str group, int peer, int tag) -> Tensor[]");
  m.def("finish_receive(Tensor[] inputs, str group, int peer, int tag) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(lazyxla_c10d, CPU, m) {
  m.impl("all_reduce", &all_reduce_kernel);
  m.impl("broadcast", &broadcast_kernel);
  m.impl("all_gather", &all_gather_kernel);
  m.impl("reduce_scatter", &reduce_scatter_kernel);
  m.impl("all_to_all", &all_to_all_kernel);
  m.impl("send", &send_kernel);
  m.impl("start_receive", &start_receive_kernel);
  m.impl("finish_receive", &finish_receive_kernel);
}

TORCH_LIBRARY_IMPL(lazyxla_c10d, Meta, m) {
  m.impl("all_reduce", &same_shapes);
  m.impl("broadcast", &same_shapes);
  m.impl("all_gather", &all_gather_shapes);
  m.impl("reduce_scatter", &reduce_scatter_shapes);
  m.impl("all_to_all", &all_to_all_shapes);
  m.impl("send", &token_shape);
  m.impl("start_receive", &token_shape);
  m.impl("finish_receive", &finish_receive_shapes);
}

// ---- recorded calls ----

// The tokens of the devices, in whichever order their threads record.
class Tokens {
 public:
  static Tokens& get() {
    static auto* instance = new Tokens();
    return *instance;
  }

  // Calls `record` on the inputs and the token, keeps the token that comes back, and returns the
  // other results.
  Tensors pass(const Tensors& inputs, c10::function_ref<Tensors(const Tensors&)> record) {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    const c10::Device device = inputs.at(0).device();
    auto& [mutex, token] = of(device);
    std::lock_guard lock(mutex);  // in eager mode it waits for other processes
    if (!token.defined() || is_lost(token)) {
      token = at::zeros({}, at::TensorOptions(device).dtype(at::kInt));
    }
    Tensors all = inputs;
    all.push_back(token);
    Tensors results = record(all);
    token = std::move(results.back());
    results.pop_back();
    return results;
  }

 private:
  struct Token {
    std::mutex mutex;
    at::Tensor value;
  };
  Token& of(c10::Device device) {
    std::lock_guard lock(mutex_);
    return tokens_[device];
  }

  // Whether the program that was to compute it failed.
  static bool is_lost(const at::Tensor& token) {
    const ir::Storage& storage = dispatch::storage_of(*token.unsafeGetTensorImpl());
    std::lock_guard lock(storage.mutex());
    const ir::Node& node = *storage.value().node.get();
    return node.is_leaf() && !graph::buffer_of(node).is_usable();
  }

  std::mutex mutex_;
  std::unordered_map<c10::Device, Token> tokens_;  // which stay where they are
};

template <typename... Args>
Tensors record(const char* name, const Tensors& inputs, const std::string& group, Args... args) {
  const auto op = dispatch::operator_named<Tensors(at::TensorList, std::string, Args...)>(name);
  return Tokens::get().pass(inputs,
                            [&](const Tensors& all) { return op.call(all, group, args...); });
}

}  // namespace

void set_transport(const std::string& group, Transport transport) {
  Groups::get().add(group, std::move(transport));
}

void remove_transport(const std::string& name) { Groups::get().remove(name); }

void finish_sends(const std::string& name) {
  const auto group = Groups::get().find(name);
  std::lock_guard lock(group->mutex);
  for (const Transfer& transfer : group->sent) transfer.work->wait();
  group->sent.clear();
}

Tensors all_reduce(const Tensors& inputs, const std::string& group, c10d::ReduceOp::RedOpType op) {
  return record("lazyxla_c10d::all_reduce", inputs, group, static_cast<int64_t>(op));
}

Tensors broadcast(const Tensors& inputs, const std::string& group, int64_t root) {
  return record("lazyxla_c10d::broadcast", inputs, group, root);
}

Tensors all_gather(const Tensors& inputs, const std::string& group, int64_t processes) {
  return record("lazyxla_c10d::all_gather", inputs, group, processes);
}

Tensors reduce_scatter(const Tensors& inputs, const std::string& group,
                       c10d::ReduceOp::RedOpType op) {
  return record("lazyxla_c10d::reduce_scatter", inputs, group, static_cast<int64_t>(op));
}

at::Tensor all_to_all(const at::Tensor& input, const std::string& group,
                      const std::vector<int64_t>& sent_rows,
                      const std::vector<int64_t>& received_rows) {
  return record("lazyxla_c10d::all_to_all", {input}, group, c10::IntArrayRef(sent_rows),
                c10::IntArrayRef(received_rows))[0];
}

void send(const at::Tensor& input, const std::string& group, int64_t peer, int64_t tag) {
  record("lazyxla_c10d::send", {input}, group, peer, tag);
}

void start_receive(const at::Tensor& like, const std::string& group, int64_t peer, int64_t tag) {
  record("lazyxla_c10d::start_receive", {like}, group, peer, tag);
}

at::Tensor finish_receive(const at::Tensor& like, const std::string& group, int64_t peer,
                          int64_t tag) {
  return record("lazyxla_c10d::finish_receive", {like}, group, peer, tag)[0];
}

}  // namespace lazyxla::distributed
