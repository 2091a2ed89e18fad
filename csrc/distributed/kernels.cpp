// What collectives do on the host's memory, and the shapes of their results.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/functional.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/FunctionRef.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "distributed/collectives.h"
#include "distributed/group.h"
#include "distributed/results.h"

namespace lazyxla::distributed {
namespace {

using Tensors = std::vector<at::Tensor>;

at::TensorList without_token(at::TensorList inputs) { return inputs.slice(0, inputs.size() - 1); }

// ---- kernels ----

at::Tensor flat(const at::Tensor& x) { return x.contiguous().view({-1}); }

// Gloo has no integers of 16 bits, say, and no floats of 8. What is only moved is moved as bytes.
at::Tensor bytes(const at::Tensor& flat) { return flat.view(at::kByte); }
at::Tensor bytes_of_rows(const at::Tensor& x) {
  const int64_t rows = x.size(0), elements = c10::multiply_integers(x.sizes().slice(1));
  return x.view({rows, elements}).view(at::kByte);
}

// A call while it runs, in its order.
class Running {
 public:
  Running(const std::string& group, at::TensorList inputs)
      : group_(find_group(group)), inputs_(inputs) {}

  Group& group() const { return *group_; }
  c10d::Backend& transport() const { return group_->transport(); }
  at::TensorList data() const { return without_token(inputs_); }
  // Does `action` once the other processes are known to do it, too.
  void exchange(c10::function_ref<void(const Call&)> action) {
    const Call call = group_->noted(token().item<int64_t>());
    group_->agreement().run(
        call, [this](int64_t number) { return group_->recorded(number); }, [&] { action(call); });
  }
  // The results, followed by the token for the next call.
  Tensors hand_on(Tensors results) const {
    results.push_back(token().add(1));
    return results;
  }

 private:
  const at::Tensor& token() const { return inputs_.back(); }

  std::shared_ptr<Group> group_;
  at::TensorList inputs_;
};

// Starts a transfer from each input to its result, where there are elements, then waits for all.
template <typename Start>
void exchange_each(at::TensorList inputs, Tensors& results, Start&& start) {
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].numel() == 0) continue;
    at::Tensor source = flat(inputs[i]), target = results[i].view({-1});
    works.push_back(start(source, target));
  }
  for (const auto& work : works) work->wait();
}

// Gloo has no integers of 16 bits: they are reduced as wider ones, whose low bits are the same.
Tensors widened(at::TensorList inputs) {
  return c10::fmap(inputs, [](const at::Tensor& x) {
    return x.scalar_type() == at::kShort ? x.to(at::kInt) : x;
  });
}

Tensors narrowed(Tensors results, at::TensorList inputs) {
  for (size_t i = 0; i < results.size(); ++i) {
    results[i] = results[i].to(inputs[i].scalar_type());
  }
  return results;
}

// The same for transfers that replace what is in the results, at first copies of the inputs.
template <typename Start>
Tensors exchange_in_place(Running& running, Start&& start) {
  Tensors results = c10::fmap(
      running.data(), [](const at::Tensor& x) { return x.clone(at::MemoryFormat::Contiguous); });
  running.exchange([&](const Call&) {
    exchange_each(running.data(), results, [&](at::Tensor&, at::Tensor& x) {
      Tensors one{x};
      return start(one);
    });
  });
  return running.hand_on(std::move(results));
}

Tensors all_reduce_kernel(at::TensorList inputs, std::string group, int64_t op) {
  const Tensors wide = widened(inputs);
  Running running(group, wide);
  c10d::AllreduceOptions options;
  options.reduceOp = static_cast<c10d::ReduceOp::RedOpType>(op);
  Tensors results = exchange_in_place(
      running, [&](Tensors& one) { return running.transport().allreduce(one, options); });
  return narrowed(std::move(results), inputs);
}

Tensors broadcast_kernel(at::TensorList inputs, std::string group, int64_t root) {
  Running running(group, inputs);
  c10d::BroadcastOptions options;
  options.rootRank = root;
  return exchange_in_place(running, [&](Tensors& one) {
    Tensors moved{bytes(one[0])};
    return running.transport().broadcast(moved, options);
  });
}

Tensors gathered(at::TensorList inputs, int64_t processes) {
  return c10::fmap(without_token(inputs), [&](const at::Tensor& x) {
    return at::empty(stacked_sizes(processes, x.sizes()), x.options());
  });
}

Tensors all_gather_kernel(at::TensorList inputs, std::string group, int64_t processes) {
  Running running(group, inputs);
  Tensors results = gathered(inputs, processes);
  running.exchange([&](const Call&) {
    exchange_each(inputs, results, [&](at::Tensor& source, at::Tensor& target) {
      at::Tensor moved = bytes(source), all = bytes(target);
      return running.transport()._allgather_base(all, moved);
    });
  });
  return running.hand_on(std::move(results));
}

Tensors scattered(at::TensorList inputs) {
  return c10::fmap(without_token(inputs),
                   [](const at::Tensor& x) { return at::empty(x.sizes().slice(1), x.options()); });
}

Tensors reduce_scatter_kernel(at::TensorList inputs, std::string group, int64_t op) {
  const Tensors wide = widened(inputs);
  Running running(group, wide);
  c10d::ReduceScatterOptions options;
  options.reduceOp = static_cast<c10d::ReduceOp::RedOpType>(op);
  Tensors results = scattered(wide);
  running.exchange([&](const Call&) {
    exchange_each(wide, results, [&](at::Tensor& source, at::Tensor& target) {
      return running.transport()._reduce_scatter_base(target, source, options);
    });
  });
  return narrowed(running.hand_on(std::move(results)), inputs);
}

at::Tensor received(const at::Tensor& x, c10::IntArrayRef rows) {
  return at::empty(stacked_sizes(c10::sum_integers(rows), x.sizes().slice(1)), x.options());
}

// Throws in all processes if one expects another number of rows than it is sent.
void check_rows(c10d::Backend& transport, c10::IntArrayRef sent, c10::IntArrayRef received) {
  const auto size = static_cast<int64_t>(sent.size());
  const auto options = at::TensorOptions().dtype(at::kLong);
  std::vector<int64_t> own = sent.vec();
  own.insert(own.end(), received.begin(), received.end());
  at::Tensor source = at::from_blob(own.data(), {2 * size}, options);
  at::Tensor all = at::empty({size, 2, size}, options);
  at::Tensor target = all.view({-1});
  transport._allgather_base(target, source)->wait();
  const auto rows = all.accessor<int64_t, 3>();
  for (int64_t from = 0; from < size; ++from) {
    for (int64_t to = 0; to < size; ++to) {
      TORCH_CHECK_VALUE(rows[from][0][to] == rows[to][1][from], "member ", from,
                        " of the group sends ", rows[from][0][to], " rows to member ", to,
                        ", which expects ", rows[to][1][from]);
    }
  }
}

Tensors all_to_all_kernel(at::TensorList inputs, std::string group, c10::IntArrayRef sent_rows,
                          c10::IntArrayRef received_rows, bool even) {
  Running running(group, inputs);
  at::Tensor source = inputs[0].contiguous();
  at::Tensor result = received(source, received_rows);
  at::Tensor moved = bytes_of_rows(source), target = bytes_of_rows(result);
  std::vector<int64_t> from = received_rows.vec(), to = sent_rows.vec();
  running.exchange([&](const Call&) {
    if (!even) check_rows(running.transport(), sent_rows, received_rows);
    running.transport().alltoall_base(target, moved, from, to)->wait();
  });
  return running.hand_on({result});
}

Tensors send_kernel(at::TensorList inputs, std::string group, int64_t peer, int64_t tag) {
  Running running(group, inputs);
  running.exchange([&](const Call& call) {
    running.group().messages().send(flat(inputs[0].clone()), peer, tag, call.line);
  });
  return running.hand_on({});
}

Tensors start_receive_kernel(at::TensorList inputs, std::string group, int64_t peer, int64_t tag) {
  Running running(group, inputs);
  running.exchange(
      [&](const Call&) { running.group().messages().start_receive(inputs[0], peer, tag); });
  return running.hand_on({});
}

Tensors finish_receive_kernel(at::TensorList inputs, std::string group, int64_t peer, int64_t tag) {
  Running running(group, inputs);
  at::Tensor result = at::empty_like(inputs[0], at::MemoryFormat::Contiguous);
  running.exchange([&](const Call&) {
    result.view({-1}).copy_(running.group().messages().finish_receive(peer, tag));
  });
  return running.hand_on({result});
}

// ---- shapes ----

template <typename... Numbers>
Tensors same_shapes(at::TensorList inputs, std::string, Numbers...) {
  return c10::fmap(
      inputs, [](const at::Tensor& x) { return at::empty_like(x, at::MemoryFormat::Contiguous); });
}

Tensors with_token(Tensors results, at::TensorList inputs) {
  results.push_back(at::empty_like(inputs.back()));
  return results;
}

Tensors all_gather_shapes(at::TensorList inputs, std::string, int64_t processes) {
  return with_token(gathered(inputs, processes), inputs);
}

Tensors reduce_scatter_shapes(at::TensorList inputs, std::string, int64_t) {
  return with_token(scattered(inputs), inputs);
}

Tensors all_to_all_shapes(at::TensorList inputs, std::string, c10::IntArrayRef,
                          c10::IntArrayRef received_rows, bool) {
  return with_token({received(inputs[0], received_rows)}, inputs);
}

Tensors token_shape(at::TensorList inputs, std::string, int64_t, int64_t) {
  return with_token({}, inputs);
}

TORCH_LIBRARY(lazyxla_c10d, m) {
  m.def("all_reduce(Tensor[] inputs, str group, int op) -> Tensor[]");
  m.def("broadcast(Tensor[] inputs, str group, int root) -> Tensor[]");
  m.def("all_gather(Tensor[] inputs, str group, int processes) -> Tensor[]");
  m.def("reduce_scatter(Tensor[] inputs, str group, int op) -> Tensor[]");
  m.def(
      "all_to_all(Tensor[] inputs, str group, int[] sent_rows, int[] received_rows, bool even) "
      "-> Tensor[]");
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
  m.impl("all_reduce", &same_shapes<int64_t>);
  m.impl("broadcast", &same_shapes<int64_t>);
  m.impl("all_gather", &all_gather_shapes);
  m.impl("reduce_scatter", &reduce_scatter_shapes);
  m.impl("all_to_all", &all_to_all_shapes);
  m.impl("send", &token_shape);
  m.impl("start_receive", &token_shape);
  m.impl("finish_receive", &same_shapes<int64_t, int64_t>);
}

}  // namespace
}  // namespace lazyxla::distributed
