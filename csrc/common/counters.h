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

struct Counters {
  std::atomic<int64_t> nodes_recorded{0};    // operators recorded (views and casts included)
  std::atomic<int64_t> shape_inferences{0};  // shape-memo misses: calls of meta functions
  std::atomic<int64_t> flushes{0};           // pending graphs run
  std::atomic<int64_t> cache_hits{0};        // flushes whose program was there already
  std::atomic<int64_t> lowerings{0};         // graphs turned into StableHLO
  std::atomic<int64_t> compiles{0};          // StableHLO modules compiled
  std::atomic<int64_t> graphs_cut{0};        // new graphs run as programs for their parts
  std::atomic<int64_t> host_programs{0};     // runs of programs that PyTorch's kernels compute
  std::atomic<int64_t> programs_loaded{0};   // programs from disk, not compiled
  std::atomic<int64_t> programs_dropped{0};  // known programs that made room for others
  std::atomic<int64_t> executions{0};        // programs enqueued
  std::atomic<int64_t> uploads{0};           // host to device copies
  std::atomic<int64_t> downloads{0};         // device to host copies
  std::atomic<int64_t> fallbacks{0};         // operators run on the host: no lowering
  std::atomic<int64_t> data_dependent{0};    // ... for a shape that depends on data: no fallbacks
  std::atomic<int64_t> kernel_calls{0};      // of these, where they are faster than XLA's forms
  std::atomic<int64_t> host_calls{0};        // operators of the CPU's run within programs
  std::atomic<int64_t> loader_waits{0};      // batches of a DeviceLoader that were waited for
  std::atomic<int64_t> nodes_lowered{0};     // nodes in the lowered graphs, dead ones left out
  std::atomic<int64_t> comparisons{0};       // of collectives, between processes
  std::atomic<int64_t> captured_steps{0};    // steps run again without their Python code

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
