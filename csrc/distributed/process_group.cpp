#include "distributed/process_group.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/locks.h"
#include "dispatch/device_state.h"
#include "distributed/argument_checks.h"
#include "distributed/collectives.h"
#include "distributed/group.h"
#include "distributed/results.h"
#include "distributed/work.h"
#include "graph/devices.h"
#include "program/replicas.h"
#include "record/flush.h"
#include "record/scope.h"

namespace py = pybind11;

namespace lazyxla::distributed {
namespace {

using c10d::ReduceOp;
using BackendRef = c10::intrusive_ptr<c10d::Backend>;
using StoreRef = c10::intrusive_ptr<c10d::Store>;

// The options of torch.distributed.split_group, with the name of the new group.
struct GroupOptions : c10d::Backend::Options {
  explicit GroupOptions(std::chrono::milliseconds timeout)
      : c10d::Backend::Options("lazyxla", timeout) {}
};
using OptionsRef = c10::intrusive_ptr<GroupOptions>;

// How the processes of a group meet and what they compare (process_group.h).
struct Meeting {
  StoreRef shared_store;
  std::vector<int64_t> ranks;  // by member
  Comparison comparison;
  std::chrono::milliseconds timeout;
};

// Connects the group's processes for one purpose: on the CPU, what carries the data of their
// collectives.
BackendRef connect(const char* purpose, const StoreRef& store, int rank, const Meeting& meeting) {
  py::gil_scoped_acquire gil;
  return py::module_::import("lazyxla.distributed")
      .attr("connect")(purpose, store, rank, meeting.ranks.size(), meeting.timeout)
      .cast<BackendRef>();
}

class ProcessGroup : public c10d::Backend {
 public:
  ProcessGroup(const StoreRef& store, int rank, std::string name, Meeting meeting)
      : Backend(rank, static_cast<int>(meeting.ranks.size())),
        name_(std::move(name)),
        meeting_(std::move(meeting)) {
    const BackendRef transport = connect("data", store, rank, meeting_);
    const BackendRef channel = meeting_.comparison == Comparison::kNever
                                   ? transport
                                   : connect("comparisons", store, rank, meeting_);
    // Until shutdown: programs refer to it by its name.
    add_group(name_, std::make_shared<Group>(transport, channel, meeting_.shared_store,
                                             meeting_.ranks, meeting_.comparison));
  }

  const std::string getBackendName() const override { return "lazyxla"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options(); }
  OptionsRef options() const { return c10::make_intrusive<GroupOptions>(meeting_.timeout); }

  // A group of these members, for those of them that are in it.
  bool supportsSplitting() const override { return true; }
  BackendRef split(const StoreRef& store, const std::vector<int>& members,
                   const c10::intrusive_ptr<c10d::Backend::Options>& options) override {
    const auto self = std::find(members.begin(), members.end(), getRank());
    if (self == members.end()) return nullptr;
    Meeting meeting = meeting_;
    meeting.timeout = options->timeout;
    meeting.ranks.clear();
    for (int member : members) meeting.ranks.push_back(meeting_.ranks.at(member));
    return c10::make_intrusive<ProcessGroup>(store, static_cast<int>(self - members.begin()),
                                             options->group_name, std::move(meeting));
  }

  bool supportsCoalescing() const override { return true; }
  // Only receives have work left to wait for.
  void startCoalescing() override { coalesced_.hold()->emplace(); }
  WorkRef endCoalescing() override {
    auto works = std::exchange(*coalesced_.hold(), std::nullopt);
    TORCH_CHECK(works, "lazyxla: no coalescing was started");
    return c10::make_intrusive<CoalescedWork>(getRank(), *std::move(works));
  }
  void setSequenceNumberForGroup() override {}
  void shutdown() override {
    if (is_over_.exchange(true)) return;  // the name may be another group's by now
    struct Remove {                       // even if a step below throws
      ~Remove() { remove_group(name); }
      const std::string& name;
    } remove{name_};
    for (c10::DeviceIndex device = 0; device < graph::device_count_bound(); ++device) {
      record::sync(device);
    }
    find_group(name_)->messages().finish_sends();
  }
  void abort() override {
    is_over_ = true;
    remove_group(name_);
  }

  WorkRef broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check_root(options.rootRank, getSize());
    Recording recording;
    write(tensors, distributed::broadcast(tensors, name_, options.rootRank));
    return done(OpType::BROADCAST, tensors);
  }

  WorkRef allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Recording recording;
    write(tensors, reduced(tensors, options.reduceOp));
    return done(OpType::ALLREDUCE, tensors);
  }

  WorkRef allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkRef reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_root(options.rootRank, getSize());
    Recording recording;
    const Tensors results = reduced(tensors, options.reduceOp);
    if (getRank() == options.rootRank) write(tensors, results);
    return done(OpType::REDUCE, tensors);
  }

  WorkRef allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    return allgather_coalesced_by_input(outputs, inputs);
  }

  WorkRef allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions&) override {
    // In this call there is one list for each process.
    std::vector<Tensors> by_input(inputs.size());
    check_one_for_each(outputs.size(), "lists of results", getSize());
    for (const Tensors& of_process : outputs) {
      check_count(of_process.size(), "results of each process", inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) by_input[i].push_back(of_process[i]);
    }
    return allgather_coalesced_by_input(by_input, inputs);
  }

  WorkRef _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkRef allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    check_count(outputs.size(), "tensors for results", inputs.size());
    Recording recording;
    for (size_t i = 0; i < inputs.size(); ++i) check_whole(outputs[i], inputs[i], getSize());
    write(outputs, all_gather(inputs, name_, getSize()));
    return done(OpType::_ALLGATHER_BASE, outputs);
  }

  // Every process gets all results, and uses its own.
  WorkRef gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    check_root(options.rootRank, getSize());
    if (getRank() == options.rootRank) check_lists(outputs, inputs, "results", getSize());
    Recording recording;
    const Tensors gathered = all_gather(inputs, name_, getSize());
    if (getRank() == options.rootRank) {
      for (size_t i = 0; i < inputs.size(); ++i) write(outputs[i], gathered[i].unbind(0));
    }
    return done(OpType::GATHER, getRank() == options.rootRank ? outputs[0] : Tensors());
  }

  WorkRef scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    check_root(options.rootRank, getSize());
    if (getRank() == options.rootRank) check_lists(inputs, outputs, "tensors to send", getSize());
    Recording recording;
    Tensors sent;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::vector<int64_t> sizes = stacked_sizes(getSize(), outputs[i].sizes());
      sent.push_back(getRank() == options.rootRank ? at::cat(flattened(inputs[i])).reshape(sizes)
                                                   : outputs[i].new_zeros(sizes));
    }
    const Tensors all = distributed::broadcast(sent, name_, options.rootRank);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(all[i].select(0, getRank()));
    return done(OpType::SCATTER, outputs);
  }

  WorkRef reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    if (inputs.size() == 1 && is_uneven(inputs[0])) {
      check_one_for_each(inputs[0].size(), "tensors to reduce", getSize());
      check_count(outputs.size(), "tensors for results", 1);
      check_parts({inputs[0][getRank()]}, outputs[0], "tensors to reduce", 1);
      Recording recording;
      const Tensors all = reduced(inputs[0], options.reduceOp);
      write_one(outputs[0], all[getRank()]);
      return done(OpType::REDUCE_SCATTER, outputs);
    }
    check_lists(inputs, outputs, "tensors to reduce", getSize());
    Recording recording;
    Tensors stacked;
    for (size_t i = 0; i < inputs.size(); ++i) {
      stacked.push_back(
          at::cat(flattened(inputs[i])).reshape(stacked_sizes(getSize(), outputs[i].sizes())));
    }
    write(outputs, scattered(stacked, options.reduceOp));
    return done(OpType::REDUCE_SCATTER, outputs);
  }

  WorkRef _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkRef reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    check_count(outputs.size(), "tensors for results", inputs.size());
    Recording recording;
    Tensors parts;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_whole(inputs[i], outputs[i], getSize());
      parts.push_back(inputs[i].reshape(stacked_sizes(getSize(), outputs[i].sizes())));
    }
    write(outputs, scattered(parts, options.reduceOp));
    return done(OpType::_REDUCE_SCATTER_BASE, outputs);
  }

  WorkRef alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received_rows,
                        std::vector<int64_t>& sent_rows, const c10d::AllToAllOptions&) override {
    Recording recording;
    const bool even = sent_rows.empty() && received_rows.empty();
    const std::vector<int64_t> sent = rows_for_each(input, sent_rows, getSize());
    const std::vector<int64_t> received = rows_for_each(output, received_rows, getSize());
    check_exchange(output, input, even);
    at::Tensor result = all_to_all(input, name_, sent, even ? sent : received, even);
    write_one(output, result);
    return done(OpType::ALLTOALL_BASE, {output});
  }

  WorkRef alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    check_exchange_of_lists(outputs, inputs, getSize());
    Recording recording;
    std::vector<int64_t> sent, received;
    for (const at::Tensor& x : inputs) sent.push_back(x.numel());
    for (const at::Tensor& x : outputs) received.push_back(x.numel());
    const at::Tensor whole =
        all_to_all(at::cat(flattened(inputs)), name_, sent, received, /*even=*/false);
    write(outputs, whole.split_with_sizes(received));
    return done(OpType::ALLTOALL, outputs);
  }

  WorkRef send(Tensors& tensors, int peer, int tag) override {
    check_peer(peer, getRank(), getSize());
    Recording recording;
    for (const at::Tensor& x : tensors) distributed::send(x, name_, peer, tag);
    return done(OpType::SEND, tensors);
  }

  WorkRef recv(Tensors& tensors, int peer, int tag) override {
    check_peer(peer, getRank(), getSize());
    Recording recording;
    TORCH_CHECK_VALUE(tensors.size() == 1, "lazyxla: recv takes one tensor");
    WorkRef work = receives_.start(getRank(), tensors[0], name_, peer, tag);
    if (const auto coalesced = coalesced_.hold(); *coalesced) (*coalesced)->push_back(work);
    return work;
  }

  WorkRef recvAnysource(Tensors&, int) override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "lazyxla: recv needs a source: what comes first is not known "
                                "before the recorded operators have run");
  }

  // Returns once all processes have run everything that they recorded before their barrier.
  WorkRef barrier(const c10d::BarrierOptions& options) override {
    const c10::Device device(c10::DeviceType::PrivateUse1, device_of_barrier(options));
    Recording recording;
    const at::Tensor met =
        all_reduce({at::zeros({1}, at::TensorOptions(device))}, name_, ReduceOp::SUM)[0];
    record::sync(device.index());
    met.item();  // raises the reason if they did not meet, in the eager modes, too
    return done(OpType::BARRIER, {});
  }

 private:
  // Where collectives are between first devices, so is a barrier, whatever device is named.
  static c10::DeviceIndex device_of_barrier(const c10d::BarrierOptions& options) {
    if (program::collectives_are_programs()) return 0;
    const c10::DeviceIndex index = options.device               ? options.device->index()
                                   : options.device_ids.empty() ? -1
                                                                : options.device_ids[0];
    return index >= 0 ? index : dispatch::current_device();
  }

  // c10d's calls are hidden from autograd.
  struct Recording {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
  };

  WorkRef done(OpType type, Tensors results) const {
    return c10::make_intrusive<RecordedWork>(getRank(), type, std::move(results));
  }

  Tensors reduced(const Tensors& inputs, const ReduceOp& op) const {
    check_reduction(inputs, op);
    return averaged(all_reduce(multiplied(inputs, op), name_, transported(op)), op, getSize());
  }
  Tensors scattered(const Tensors& inputs, const ReduceOp& op) const {
    check_reduction(inputs, op);
    return averaged(distributed::reduce_scatter(multiplied(inputs, op), name_, transported(op)), op,
                    getSize());
  }

  // Each process's is broadcast.
  WorkRef allgather_uneven(const Tensors& outputs, const at::Tensor& input) {
    check_one_for_each(outputs.size(), "results", getSize());
    check_parts({outputs[getRank()]}, input, "results", 1);
    Recording recording;
    for (int root = 0; root < getSize(); ++root) {
      const at::Tensor& sent = root == getRank() ? input : outputs[root];
      write_one(outputs[root], distributed::broadcast({sent}, name_, root)[0]);
    }
    return done(OpType::ALLGATHER, outputs);
  }

  WorkRef allgather_coalesced_by_input(std::vector<Tensors>& outputs, const Tensors& inputs) {
    if (inputs.size() == 1 && outputs.size() == 1 && is_uneven(outputs[0])) {
      return allgather_uneven(outputs[0], inputs[0]);
    }
    check_lists(outputs, inputs, "results", getSize());
    Recording recording;
    const Tensors gathered = all_gather(inputs, name_, getSize());
    for (size_t i = 0; i < inputs.size(); ++i) write(outputs[i], gathered[i].unbind(0));
    Tensors all;
    for (const Tensors& each : outputs) all.insert(all.end(), each.begin(), each.end());
    return done(OpType::ALLGATHER, std::move(all));
  }

  std::string name_;
  Meeting meeting_;
  Receives receives_;
  std::atomic<bool> is_over_{false};
  Guarded<std::optional<std::vector<WorkRef>>> coalesced_;  // since startCoalescing
};

}  // namespace

void bind_process_group(py::module_& m) {
  if (!py::hasattr(py::module_::import("torch._C"), "_c10d_init")) return;  // built without c10d
  install_collective_launches();
  // PyTorch has the classes that these derive from.
  const py::object backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<ProcessGroup, c10::intrusive_ptr<ProcessGroup>>(m, "ProcessGroup", backend)
      .def_property_readonly("options", &ProcessGroup::options);
  const auto copy = [](const GroupOptions& self, py::args) {
    return c10::make_intrusive<GroupOptions>(self);
  };
  py::class_<GroupOptions, OptionsRef>(m, "ProcessGroupOptions", backend.attr("Options"))
      .def("__copy__", copy)
      .def("__deepcopy__", copy);
  m.def("make_process_group", [](const StoreRef& store, StoreRef shared_store, std::string name,
                                 std::vector<int64_t> ranks, int rank,
                                 std::chrono::milliseconds timeout, const std::string& comparison) {
    run_recorded_before_host_collectives();
    return c10::make_intrusive<ProcessGroup>(
        store, rank, std::move(name),
        Meeting{std::move(shared_store), std::move(ranks), comparison_named(comparison), timeout});
  });
}

}  // namespace lazyxla::distributed
