// Running what is pending: what a flush does.
//
// It detaches everything in a pending set (walk.h), finds or makes the program (program/program.h),
// enqueues it and keeps its promises (execute.h). A connected graph is one program; one that is not
// connected may become several (walk.h's split).
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <vector>

#include "ir/storage.h"
#include "program/program.h"

namespace lazyxla::graph {

// The record room's settings of a flush.
struct RunSettings {
  uint64_t options;   // the number of the compile options (program/graph.h)
  bool may_divide;    // it may become several programs
  bool nobody_waits;  // for its results: its program may be compiled in the background
  c10::function_ref<program::Origin()> origin;  // asked for if a program is to be made
};

// No-op if nothing is pending.
void run_pending(ir::PendingSet& pending, const RunSettings& settings);

// For tests: notes the hashes of the keys of all graphs that the calling thread flushes, from
// `trace_keys` on; `traced_keys` ends that.
void trace_keys();
std::vector<uint64_t> traced_keys();

}  // namespace lazyxla::graph
