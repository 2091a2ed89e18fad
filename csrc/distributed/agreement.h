// Whether the processes of a group call the same collectives, and what to say if they do not.
//
// A wait for another process is in vain if that one ended, is late or calls something else; and
// Gloo ends the process that is sent more than it expects, or takes other numbers for its own. So
// collectives are compared before their data is exchanged: the processes exchange hashes of what
// they call and of its number. That costs a round trip. But a collective is recorded long before it
// runs, so they exchange at once the hashes of all that are recorded and did not run yet. As far as
// all agree, nothing is compared any more: a step of training costs one round trip, however many
// collectives it has.
//
//     process 0 has recorded   all_reduce 7, all_reduce 8, broadcast 9
//     process 1 has recorded   all_reduce 7, all_reduce 8                 agreed as far as 8
//
// Where a program of several collectives is launched on the devices of all (program/replicas.h),
// its hash is exchanged, too: if all have the same, they agree on all of its collectives. Then all
// calls are compared: which calls are compared depends on what all processes know, never on what
// one does.
//
// The hashes use connections of their own, where no collective's data can be taken for them. When a
// collective fails, each process reports through the store which call it was in; each error names
// the processes that differ, and those that report nothing.
//
// A group whose processes disagreed, or lost one, remains broken: every later collective fails at
// once.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <string>
#include <vector>

#include "common/locks.h"
#include "distributed/comparison.h"
#include "program/replicas.h"

namespace lazyxla::distributed {

// A collective as it runs; or a program that is launched on the devices of all the processes.
struct Call {
  std::string description;  // "all_reduce(SUM) of float32[3]": the same in all processes
  int64_t number = 0;       // among the group's, from 1, as recorded; 0: not one that all call
  std::string line;         // the user's, "train.py:31"; empty if unknown
  std::vector<std::string> operators{};  // of a program: the first that differs is reported
};

// What the calls of an Agreement are, for its messages.
struct Words {
  const char *differ, *failed;
};
inline constexpr Words kCollectives{"call different collectives", "a collective failed"};
inline constexpr Words kPrograms{"launch different programs", "launching a program failed"};

// A program that begins with a call, of that many calls of the group.
struct Whole {
  uint64_t hash;             // the same in all processes if the program is; 0: there is none
  uint64_t without_numbers;  // the same if it differs in numbers only
  int64_t calls;
  bool has_parts;  // whether the process has what is launched instead if not all have the program
};

// Of a call's description and number, the same in all processes.
int64_t identity_of(const Call& call);

class Agreement {
 public:
  // `ranks`: those of the group's processes among all, which messages name. They exchange hashes
  // over the channel; the store is shared by all processes; it gets a
  // connection of our own, since whoever waits in a store keeps others from it.
  Agreement(c10::intrusive_ptr<c10d::Backend> channel, c10::intrusive_ptr<c10d::Store> store,
            std::vector<int64_t> ranks, Comparison comparison, Words words = kCollectives);

  // The calls that are recorded and did not run yet, from this number on: their identities.
  using Recorded = c10::function_ref<std::vector<int64_t>(int64_t)>;

  // Compares the call with that of the other processes, then exchanges its data. Throws an error
  // with each process's call if they differ or the exchange fails. `compare_all`, for a call that
  // is a program of all: each call that was not compared before is compared, as by `agree`;
  // otherwise no process knows what the others do.
  void run(const Call& call, Recorded recorded, c10::function_ref<void()> exchange,
           bool compare_all = false);
  // Whether the call was compared before it ran, with one of the group's earlier ones.
  bool is_agreed_on(const Call& call);
  // Whether all processes are to launch the same program, which begins with the call; they are not
  // if it is agreed on. Throws if they are not in the same call. `run`, or `launch_whole`, is to be
  // called next.
  program::Launched agree(const Call& call, Recorded recorded, const Whole& whole);
  // Instead of it, for the groups that agreed, if not all of the program's did. What a process has
  // to make first may fail: then the call is compared again before something is launched.
  void agree_anew(const Call& call, program::Launched found);
  // Instead of launching what all have agreed to make, if this process cannot: the others learn the
  // reason where they compare the call again. If none can, the group remains as it is. Does nothing
  // if they do not compare it. Throws nothing.
  void give_up(const Call& call, const std::string& error);
  // After all have agreed, in all of the program's groups. `launch` may do nothing.
  void launch_whole(const Call& call, const Whole& whole, c10::function_ref<void()> launch);

 private:
  enum class Same { kNothing, kCall, kAllButNumbers, kProgram, kAllGaveUp };
  enum Readiness : int64_t { kIsReady, kHasToMake, kGaveUp };

  // Calls `action`; if it throws or returns false, throws an error with each process's call.
  void attempt(const Call& call, c10::function_ref<bool()> action);
  bool is_to_be_compared(const Call& call, bool compare_all);
  // What all processes have in common. Notes how far they agree, and whether all are ready.
  Same compare(const Call& call, Recorded recorded, const Whole& whole, Readiness own);
  Same compare(const Call& call, Recorded recorded);  // of a call by itself
  // Remembers and throws what all processes report, this one with the error that it met, if any.
  [[noreturn]] void fail(const Call& call, const std::string& error);
  // By member of the group: its report, or empty.
  std::vector<std::string> exchange_reports(const std::string& own);
  std::string key(size_t member) const;

  c10::intrusive_ptr<c10d::Backend> channel_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::vector<int64_t> ranks_;
  Comparison comparison_;
  Words words_;
  OrderedMutex mutex_;  // guards the members below, and admits one call at a time
  Sequence sequence_;
  int64_t last_number_ = 0;
  int64_t agreed_ = 0;     // the number of the last call on which all agree
  bool all_ready_ = true;  // to launch the call that was compared last
  std::string broken_;     // why the group no longer works
};

}  // namespace lazyxla::distributed
