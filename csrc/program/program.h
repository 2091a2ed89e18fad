// Programs: compiled graphs and the cache that finds them again.
//
// A Program is all that was compiled for one canonical key. It has variants, because scalars are
// constants until they prove to be variable:
//
//     step 1: lr = 0.1            variant A: every scalar a constant of the module
//     step 2: lr = 0.09           variant B: lr is a runtime input; compiled once
//     step 3: lr = 0.081          variant B again, and forever
//
// A slot whose number a lowering rule needed at compile time is static: it never becomes an input,
// and each of its values is a variant of its own. Seeds and ordinals of random operators are inputs
// from the start.
//
// The cache compares keys in full; a hash collision cannot confuse two graphs. Looking up and
// running needs no GIL; lowering (a miss) takes it.
//
// Where the client spans processes, a graph with collectives is one program of several processes,
// or several programs (replicas.h).
//
// What was compiled before, by any process, is loaded from disk (program_store.h).
//
// The cache is bounded (LAZYXLA_MAX_PROGRAMS), also by what a program for the CPU takes of the
// process (pjrt/host_memory.h). When it is full, the least recently run quarter is dropped.
#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/locks.h"
#include "program/cut.h"
#include "program/graph.h"
#include "program/host_program.h"
#include "program/recurrence.h"
#include "program/variant.h"

namespace lazyxla::program {

struct Lowered {
  std::string artifact;  // StableHLO portable artifact
  std::vector<uint32_t> static_slots;
};

// Thrown by the lowerer for a node that cannot be lowered. The message is complete.
struct LoweringFailure : std::runtime_error {
  LoweringFailure(const std::string& message, size_t node)
      : std::runtime_error(message), node(node) {}
  size_t node;  // its position in Graph::nodes
};

// Thrown by an Origin's `admit`. The message is complete.
struct TooManyPrograms : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The origin of a flush: what a worker (workers.h) cannot know of the thread that it works for.
struct Origin {
  std::string line;  // the user's, "train.py:31"; empty if unknown
  // Called with the reason before a program is compiled; returns the reason to report to the user,
  // or throws TooManyPrograms. May be null.
  std::function<std::string(const std::string& reason)> admit;
  bool may_cut = false;            // whether its program may be several (cut.h)
  OnHost on_host = OnHost::kNone;  // which graphs PyTorch's kernels may run
  // If the graph is a stage of one that was cut: why, in words, and which of its slots vary there.
  std::string part_of;
  std::vector<bool> varying;
};

// Why a program is made, to be reported to the user.
struct Occasion {
  std::string line;    // as in Origin
  std::string reason;  // in words
  uint64_t key;        // a hash of the graph's key, the same in every process if it can be
};

// Turns a graph into StableHLO; `variable` says per slot whether it is a runtime input. Set once,
// by the bindings; takes the GIL itself. Called on workers only.
using Lowerer =
    std::function<Lowered(const Graph&, const std::vector<bool>& variable, const Occasion&)>;
void set_lowerer(Lowerer lowerer);

// What else is reported to the user: that a program was loaded instead of lowered and compiled,
// that the host computes it, or that a graph was cut into stages, with their numbers of operators.
struct Listeners {
  std::function<void(size_t operators, const Occasion&)> loaded;
  std::function<void(const Graph&, const Occasion&)> on_host;
  std::function<void(const std::vector<size_t>& operators, const Occasion&)> cut;
};
// Set once, by the bindings.
inline auto& listeners = *new Listeners();

// Who compiles a new program: the caller, who waits, or a pool of threads.
enum class Compile : uint8_t { kNow, kInBackground };

// The first runs of a program, which the host does. At the fourth one begins compiling, on another
// thread; at the 64th one its result is taken, be it ready or waited for: what counts is how often
// a graph recurs, so that the same loop computes the same in each process. In training, in eager
// mode, and where a run takes long, there are fewer (trial.cpp).
//
// Or the first runs in stages: a graph that is cut, and recurs as often all the same, is better one
// program.
struct Trial {
  VariantRef variant;     // the host's, or of stages; null if the trial is over
  int compiled_at, most;  // runs
  int runs = 1;
  bool on_host = true;  // all of it, or most of its stages
};

class Program {
 public:
  // `dropped`: whether an earlier one for this key was dropped from the cache.
  Program(const Graph& graph, bool dropped)
      : key_(graph.key), hash_(graph.hash), dropped_(dropped) {}
  const std::vector<uint64_t>& key() const { return key_; }
  uint64_t hash() const { return hash_; }

  // The variant for these scalar values, if it is known; else, or while one is made, null.
  VariantRef find(const Graph& graph);
  // The same; if there is none, the caller, a worker, lowers and compiles it.
  VariantRef variant(const Graph& graph, Compile how, const Origin& origin);

  // When one of its variants ran last, and how many there are: none if no graph could be lowered.
  // Nothing while one is being lowered.
  struct Use {
    int64_t last_run;
    int64_t size;  // of its variants
  };
  std::optional<Use> use();

 private:
  VariantRef known(const Graph& graph);
  // Whether it was never made.
  bool is_new() const { return variants_.empty() && stages_.empty() && !trial_; }
  // Counts how often the graphs of its line come. What the host may do of this one.
  OnHost note_flush(const Origin& origin);
  void note_again();
  // The host's variant if the host does this run, too; else null, and the trial is over.
  VariantRef go_on_trying(const Graph& graph, const Origin& origin);
  bool is_on_trial() const { return trial_ && trial_->variant; }
  void add(VariantRef variant);
  VariantRef make(const Graph& graph, Compile how, const Origin& origin);
  VariantRef make_whole(const Graph& graph, Compile how, const Origin& origin,
                        const std::string& new_reason);
  // If there is a plan for it, becomes a graph that is cut.
  std::string take_plan(const Graph& graph, const Origin& origin);
  std::shared_ptr<Variant> make_stages(const Graph& graph, const std::vector<uint32_t>& stages,
                                       const Origin& origin, const std::string& reason,
                                       bool is_new) const;
  VariantRef make_cut(const Graph& graph, const Origin& origin, const std::string& reason,
                      bool is_new);
  VariantRef make_apart(const Graph& graph, const Origin& origin, const std::string& reason) const;
  // One program of all members of a group; null if it cannot be. Else it takes the pieces.
  VariantRef make_of_all(const Graph& graph, std::vector<Piece>& pieces, const Origin& origin,
                         const std::string& reason) const;
  VariantRef make_exchange(const Graph& graph, const Origin& origin) const;
  // What the host may run, or its first runs; null if it is to be compiled (trial.cpp).
  VariantRef make_on_host(const Graph& graph, const Origin& origin, const std::string& reason);
  VariantRef make_tried(const Graph& graph, const Origin& origin, const std::string& reason,
                        bool is_new) const;
  // Which of a new variant's slots are to be inputs; and which of these have varied, or were
  // inputs before.
  std::vector<bool> wanted_inputs(const Graph& graph) const;
  std::vector<bool> needed_inputs(const Graph& graph) const;
  // Whether another process that runs it together with this one has other constants.
  bool others_have_other_numbers() const;
  // Why this graph is compiled, in words; `new_reason` if it is the first of its key.
  std::string reason(const Graph& graph, const std::vector<bool>& variable,
                     const std::string& new_reason) const;

  std::vector<uint64_t> key_;
  uint64_t hash_;
  bool dropped_;
  OrderedMutex mutex_;  // held while lowering: two workers never compile the same program twice
  std::atomic<bool> is_making_{false};  // set by the mutex's holder, which must not lock it again
  std::deque<VariantRef> variants_;     // newest first
  std::vector<bool> static_slots_;
  std::vector<bool> varying_;      // per slot, whether it is to be an input at once; or empty
  std::vector<uint32_t> stages_;   // how it is cut, if it is
  std::optional<Trial> trial_;     // if there was one
  std::shared_ptr<Line> line_;     // the user's, while its graph has come once only; else null
  bool in_changing_line_ = false;  // that line's graphs did not recur
};

// The program for this graph's key, made if it is new.
std::shared_ptr<Program> find_program(const Graph& graph);

// Whether a program for this key is on disk; or was made by this process, or is on disk.
bool is_on_disk(const Graph& graph);
bool is_known(const Graph& graph);

// How many programs and variants the cache holds.
size_t cached_programs();

}  // namespace lazyxla::program
