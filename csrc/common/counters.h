// Counters: how often the backend did what.
//
// One process-wide table of monotonic counts, readable from Python as `lazyxla.counters()`. Tests
// assert on them; a training loop whose `compiles` keeps growing has found its problem.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "common/locks.h"

namespace lazyxla {

// Their names, and what each counts.
#define LAZYXLA_COUNTERS(X)                                                       \
  X(nodes_recorded, "operators recorded (views and casts included)")              \
  X(shape_inferences, "shape-memo misses: calls of meta functions")               \
  X(flushes, "pending graphs run")                                                \
  X(cache_hits, "flushes whose program was there already")                        \
  X(lowerings, "graphs turned into StableHLO")                                    \
  X(compiles, "StableHLO modules compiled")                                       \
  X(graphs_cut, "new graphs run as programs for their parts")                     \
  X(host_programs, "runs of programs that PyTorch's kernels compute")             \
  X(programs_loaded, "programs from disk, not compiled")                          \
  X(programs_dropped, "known programs that made room for others")                 \
  X(executions, "programs enqueued")                                              \
  X(uploads, "host to device copies")                                             \
  X(downloads, "device to host copies")                                           \
  X(fallbacks, "operators run on the host: no lowering")                          \
  X(data_dependent, "operators run on the host for a shape that depends on data") \
  X(host_calls, "operators of the CPU's run within programs")                     \
  X(kernel_calls, "... of those, where they are faster than XLA's forms")         \
  X(loader_waits, "batches of a DeviceLoader that were waited for")               \
  X(nodes_lowered, "nodes in the lowered graphs, dead ones left out")             \
  X(comparisons, "of collectives, between processes")                             \
  X(captured_steps, "steps run again without their Python code")

struct Counters {
#define LAZYXLA_COUNTER(name, what) std::atomic<int64_t> name{0};
  LAZYXLA_COUNTERS(LAZYXLA_COUNTER)
#undef LAZYXLA_COUNTER

  static Counters& get() { return instance_; }

  void count_fallback(const std::string& op);
  std::map<std::string, int64_t> fallbacks_by_operator();
  std::map<std::string, int64_t> snapshot();
  void reset();

 private:
  static Counters instance_;

  Guarded<std::unique_ptr<std::map<std::string, int64_t>>> by_operator_;
};

}  // namespace lazyxla
