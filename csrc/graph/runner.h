// The runner: runs programs in their order while some of them still compile.
//
// In the eager modes nobody waits for a program to be compiled. Compiling is done by a pool of
// threads (program.h), and a run whose program is not ready yet, or that has others before it,
// waits for its turn on a thread of its own. The caller goes on to the next operator, whose program
// may be compiled at the same time; its results are promised, and whoever reads one waits for it.
// In steady state nothing compiles, nothing waits, and the caller runs everything itself.
//
// Errors of such a run are told by whoever reads its results. With LAZYXLA_BLOCKING nothing is put
// off.
#pragma once

#include "graph/execute.h"

namespace lazyxla::graph {

// Runs it: now, if its turn has come and its program is compiled, else later.
void run_in_turn(const Run& run, c10::DeviceIndex device);

// Waits until no run of the device is waiting any more.
void finish_waiting_runs(c10::DeviceIndex device);

}  // namespace lazyxla::graph
