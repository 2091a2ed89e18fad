// Messages: what one process of a group sends to another.
//
// Gloo ends a process that is sent more than it expects, and accepts less silently. So messages are
// matched by dtype and number of elements as well as by the user's tag: one that does not match
// waits, until the group's timeout, for a receiver that expects it. A message that is compared
// (comparison.h) also has a header, which is sent separately and adds no waiting. It lets the
// receiver report a mismatch at once:
//
//     process 1: recv(from 0) of float32[4] at train.py:7:
//       process 0 sent 3 of float32 at train.py:5
//
// What is sent belongs to the group until it is received; a thread waits for that.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed/comparison.h"

namespace lazyxla::distributed {

// A transfer that runs in the background, and its memory. Nothing is transferred without `work`.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor data;
};

class Messages {
 public:
  // `channel`: what carries the headers. `ranks`: those of the group's processes among all.
  Messages(c10::intrusive_ptr<c10d::Backend> transport, c10::intrusive_ptr<c10d::Backend> channel,
           std::vector<int64_t> ranks, Comparison comparison);
  ~Messages();
  Messages(const Messages&) = delete;
  Messages& operator=(const Messages&) = delete;

  // Of tensors of one dimension. `line`: the user's, or empty. One call at a time.
  void send(at::Tensor data, int64_t peer, int64_t tag, const std::string& line);
  // What was started is finished in the same order, for each peer and tag.
  void start_receive(const at::Tensor& like, int64_t peer, int64_t tag);
  // Throws what was sent, if it is something else.
  at::Tensor finish_receive(int64_t peer, int64_t tag);
  // Waits until all that was sent is received.
  void finish_sends();

 private:
  struct Started {
    Transfer header, message;
  };
  using Stream = std::pair<int64_t, int64_t>;  // a peer and a tag
  Sequence& sequence(std::map<Stream, Sequence>& sequences, Stream stream) {
    return sequences.try_emplace(stream, comparison_).first->second;
  }
  class Sends;

  c10::intrusive_ptr<c10d::Backend> transport_, channel_;
  std::vector<int64_t> ranks_;
  Comparison comparison_;
  std::map<Stream, Sequence> sent_, received_;
  std::map<Stream, std::deque<Started>> started_;
  std::shared_ptr<Sends> sends_;
};

}  // namespace lazyxla::distributed
