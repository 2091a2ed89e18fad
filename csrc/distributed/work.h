// What c10d's calls return (Work): only receives have work left to do.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/fork.h"
#include "common/gil.h"
#include "common/locks.h"
#include "distributed/collectives.h"

namespace lazyxla::distributed {

using Tensors = std::vector<at::Tensor>;
using WorkRef = c10::intrusive_ptr<c10d::Work>;
using c10d::OpType;

class RecordedWork : public c10d::Work {
 public:
  RecordedWork(int rank, OpType type, Tensors results)
      : Work(rank, type), results_(std::move(results)) {
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    if (!results_.empty()) devices.push_back(results_[0].device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Tensors results_;
};

// Its result is recorded when it is waited for, so that sends in between are recorded before it:
// otherwise two processes that receive, then send, would wait for each other for ever. Messages
// from one process under one tag are received in the order in which the receives were started, in
// whatever order, and by whatever threads, they are waited for. Each reports its own failure.
class ReceiveWork : public c10d::Work {
 public:
  struct Queue {
    OrderedMutex mutex;  // held while a receive is recorded: in eager mode until it is over
    std::deque<c10::intrusive_ptr<ReceiveWork>> works;
  };

  // `queue` has those that were started before.
  ReceiveWork(int rank, at::Tensor target, std::string group, int64_t peer, int64_t tag,
              std::shared_ptr<Queue> queue)
      : Work(rank, OpType::RECV),
        target_(std::move(target)),
        group_(std::move(group)),
        peer_(peer),
        tag_(tag),
        queue_(std::move(queue)) {}
  int sourceRank() const override { return static_cast<int>(peer_); }
  bool isCompleted() override {
    WithoutGil no_gil;  // c10d's bindings release it for `wait` only
    std::lock_guard lock(queue_->mutex);
    while (!Work::isCompleted() && !queue_->works.empty()) {
      const auto first = std::move(queue_->works.front());
      queue_->works.pop_front();
      first->take();
    }
    return Work::isCompleted();
  }
  bool wait(std::chrono::milliseconds) override {
    const bool is_over = isCompleted();
    if (const auto error = exception()) std::rethrow_exception(error);
    return is_over;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override {
    wait(kNoTimeout);
    return {target_};
  }

 private:
  void take() {
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    try {
      target_.copy_(finish_receive(target_, group_, peer_, tag_));
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
  }

  at::Tensor target_;
  std::string group_;
  int64_t peer_, tag_;
  std::shared_ptr<Queue> queue_;
};

// The receives of a group.
class Receives {
 public:
  ~Receives() {
    if (forked()) return;  // a thread of the parent may have held the locks
    WithoutGil no_gil;
    const auto queues = std::exchange(*queues_.hold(), {});
    for (const auto& [from, queue] : queues) {
      std::lock_guard lock(queue->mutex);
      queue->works.clear();  // which refer to it
    }
  }

  WorkRef start(int rank, at::Tensor target, const std::string& group, int64_t peer, int64_t tag) {
    WithoutGil no_gil;
    const std::shared_ptr<ReceiveWork::Queue> queue = queue_of(peer, tag);
    std::lock_guard lock(queue->mutex);
    start_receive(target, group, peer, tag);
    auto work = c10::make_intrusive<ReceiveWork>(rank, std::move(target), group, peer, tag, queue);
    queue->works.push_back(work);
    return work;
  }

 private:
  std::shared_ptr<ReceiveWork::Queue> queue_of(int64_t peer, int64_t tag) {
    const auto queues = queues_.hold();
    auto& queue = (*queues)[{peer, tag}];
    if (!queue) queue = std::make_shared<ReceiveWork::Queue>();
    return queue;
  }

  Guarded<std::map<std::pair<int64_t, int64_t>, std::shared_ptr<ReceiveWork::Queue>>> queues_;
};

// Works that are waited for together.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<WorkRef> works)
      : Work(rank, OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override { return wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkRef& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  std::vector<WorkRef> works_;
};

}  // namespace lazyxla::distributed
