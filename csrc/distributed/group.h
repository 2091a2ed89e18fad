// A process group as programs know it: by its name, which stands in them and is the same in all
// processes.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "distributed/agreement.h"

namespace lazyxla::distributed {

// A transfer that goes on in the background, and its memory.
struct Transfer {
  c10::intrusive_ptr<c10d::Work> work;
  at::Tensor data;
};

// The turn of a call among all that a device records, which the token has: from this number on.
inline int64_t first_turn(c10::DeviceIndex device) { return int64_t{device} << 48; }

class Group {
 public:
  Group(c10::intrusive_ptr<c10d::Backend> transport, c10::intrusive_ptr<c10d::Store> store,
        std::vector<int64_t> ranks, Comparison comparison)
      : agreement_(transport, std::move(store), std::move(ranks), comparison),
        transport_(std::move(transport)) {}

  c10d::Backend& transport() const { return *transport_; }
  Agreement& agreement() { return agreement_; }

  // Notes a call that is recorded, of all processes or of two, and the user's line.
  void note(int64_t turn, bool of_all, std::string line);
  // What was noted of the call that runs now, which has no description yet. What the device
  // recorded before and did not run is forgotten.
  Call noted(int64_t turn);

  // Until it is received.
  void keep_sent(Transfer transfer);
  void finish_sends();
  // What was started is taken in the same order, for each peer and tag.
  void keep_started(int64_t peer, int64_t tag, Transfer transfer);
  Transfer take_started(int64_t peer, int64_t tag);

 private:
  Agreement agreement_;
  c10::intrusive_ptr<c10d::Backend> transport_;
  std::mutex mutex_;  // guards what follows
  std::deque<Transfer> sent_;
  std::map<std::pair<int64_t, int64_t>, std::deque<Transfer>> started_;  // by peer and tag
  std::map<int64_t, Call> noted_;                                        // by turn
  int64_t recorded_ = 0;                                                 // calls of all processes
};

void add_group(const std::string& name, std::shared_ptr<Group> group);
// Programs that were recorded with it and did not run yet will fail.
void remove_group(const std::string& name);
// Throws if there is none.
std::shared_ptr<Group> find_group(const std::string& name);

}  // namespace lazyxla::distributed
