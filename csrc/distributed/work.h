// What c10d's calls return (Work): only receives have work left to do.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
// whatever order they are waited for.
class ReceiveWork : public c10d::Work {
 public:
  using Queue = std::deque<c10::intrusive_ptr<ReceiveWork>>;

  // `queue` has those that were started before, and gets this one.
  static WorkRef start(int rank, at::Tensor target, const std::string& group, int64_t peer,
                       int64_t tag, std::shared_ptr<Queue> queue) {
    start_receive(target, group, peer, tag);
    auto work = c10::make_intrusive<ReceiveWork>(rank, std::move(target), group, peer, tag, queue);
    queue->push_back(work);
    return work;
  }

  ReceiveWork(int rank, at::Tensor target, std::string group, int64_t peer, int64_t tag,
              std::shared_ptr<Queue> queue)
      : Work(rank, OpType::RECV),
        target_(std::move(target)),
        group_(std::move(group)),
        peer_(peer),
        tag_(tag),
        queue_(std::move(queue)) {}
  bool isCompleted() override { return wait(kNoTimeout); }
  bool isSuccess() const override { return true; }
  int sourceRank() const override { return static_cast<int>(peer_); }
  bool wait(std::chrono::milliseconds) override {
    while (!is_done_ && !queue_->empty()) {
      const auto first = queue_->front();
      queue_->pop_front();
      first->take();
    }
    return is_done_;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override {
    wait(kNoTimeout);
    return {target_};
  }

 private:
  void take() {
    is_done_ = true;
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    target_.copy_(finish_receive(target_, group_, peer_, tag_));
  }

  at::Tensor target_;
  std::string group_;
  int64_t peer_, tag_;
  std::shared_ptr<Queue> queue_;
  bool is_done_ = false;
};

// Works that are waited for together.
class CoalescedWork : public c10d::Work {
 public:
  CoalescedWork(int rank, std::vector<WorkRef> works)
      : Work(rank, OpType::COALESCED), works_(std::move(works)) {}
  bool isCompleted() override { return wait(kNoTimeout); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkRef& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }

 private:
  std::vector<WorkRef> works_;
};

}  // namespace lazyxla::distributed
