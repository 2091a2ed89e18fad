// Whether the processes of a group call the same collectives, and what to say if they do not.
//
// What waits for another process waits in vain if that one ended, is late or calls something else;
// and Gloo ends the process that is sent more than it expects, or takes other numbers for its own.
// So collectives are compared before their data is exchanged: the processes exchange a hash of what
// they call and of its number. That costs a round trip, so that by default each pair of collectives
// that follow one another is compared the first two times only. Processes that agreed so far make
// the same choice. When a collective fails, all tell one another through the store what they were
// in; each error names those that differ, and those that say nothing.
//
// A group whose processes disagreed, or lost one, stays so: every later collective fails at once.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace lazyxla::distributed {

// A collective as it runs.
struct Call {
  std::string description;  // "all_reduce(SUM) of float32[3]": the same in all processes
  int64_t number = 0;       // among the group's, from 1, as recorded; 0: not one that all call
  std::string line;         // the user's, "train.py:31"; empty if unknown
};

enum class Comparison { kNever, kFirst, kAlways };
// "never", "first", "always".
Comparison comparison_named(const std::string& name);

class Agreement {
 public:
  // `ranks`: those of the group's processes among all, which messages name. The store is shared by
  // all processes.
  Agreement(c10::intrusive_ptr<c10d::Backend> transport, c10::intrusive_ptr<c10d::Store> store,
            std::vector<int64_t> ranks, Comparison comparison);

  // Compares the call with that of the other processes, then exchanges its data. Throws what each
  // process was in, if they differ or the exchange fails.
  void run(const Call& call, c10::function_ref<void()> exchange);

 private:
  bool is_to_be_compared(const Call& call);
  // Whether all processes are in the same call.
  bool compare(const Call& call);
  // Remembers and throws what all processes tell, this one with the error that it met, if any.
  [[noreturn]] void fail(const Call& call, const std::string& error);
  // By member of the group: what it tells; empty if it does not.
  std::vector<std::string> exchange_reports(const std::string& own);
  std::string key(size_t member) const;

  c10::intrusive_ptr<c10d::Backend> transport_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int64_t> ranks_;
  Comparison comparison_;
  std::mutex mutex_;  // guards what follows, and keeps one call at a time
  size_t last_ = 0;   // hash of the last call's description
  int64_t last_number_ = 0;
  std::unordered_map<size_t, int> compared_;  // times, by pair of calls
  std::string broken_;                        // why the group no longer works
};

}  // namespace lazyxla::distributed
