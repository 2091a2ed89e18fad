// A process group as programs know it: by its name, which they contain and which is the same in all
// processes.
#pragma once

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/locks.h"
#include "distributed/agreement.h"
#include "distributed/messages.h"

namespace lazyxla::distributed {

// The turn of a device's first call. The token holds the turn of a call among all that a device
// records.
inline int64_t first_turn(c10::DeviceIndex device) { return int64_t{device} << 48; }

class Group {
 public:
  // `channel`: carries the data of comparisons.
  Group(c10::intrusive_ptr<c10d::Backend> transport, c10::intrusive_ptr<c10d::Backend> channel,
        c10::intrusive_ptr<c10d::Store> store, std::vector<int64_t> ranks, Comparison comparison)
      : agreement_(channel, std::move(store), ranks, comparison),
        messages_(transport, channel, ranks, comparison),
        transport_(std::move(transport)),
        ranks_(std::move(ranks)),
        compares_(comparison != Comparison::kNever) {}

  // The ranks of its members among all processes.
  const std::vector<int64_t>& ranks() const { return ranks_; }

  bool compares() const { return compares_; }

  c10d::Backend& transport() const { return *transport_; }
  Agreement& agreement() { return agreement_; }

  Messages& messages() { return messages_; }

  // Notes a call that is recorded, of all processes or of two, and the user's line.
  void note(int64_t turn, bool of_all, std::string description, std::string line);
  // The note of the call that runs now. Notes of the device's earlier calls are dropped.
  Call noted(int64_t turn);
  // The identities of the calls of all processes that are recorded, from this number on.
  std::vector<int64_t> recorded(int64_t number);

 private:
  Agreement agreement_;
  Messages messages_;
  c10::intrusive_ptr<c10d::Backend> transport_;
  std::vector<int64_t> ranks_;
  bool compares_;
  struct Notes {
    std::map<int64_t, Call> by_turn;
    std::map<int64_t, int64_t> identities;  // of calls of all processes, by number
    int64_t recorded = 0;                   // calls of all processes
  };
  Guarded<Notes> notes_;
};

void add_group(const std::string& name, std::shared_ptr<Group> group);
// Programs that were recorded with it and did not run yet will fail.
void remove_group(const std::string& name);
// Throws if there is none.
std::shared_ptr<Group> find_group(const std::string& name);

}  // namespace lazyxla::distributed
