// Threads of the CPU plugin, and of our own, that Linux schedules beside the user's.
//
// A program is handed to one thread of the plugin, which gives the large operations in it to a pool
// of compute threads, one per core. The threads that hand out work (this one, the user's,
// autograd's) sleep in between, and when one wakes up on the core of a pool thread, one of the two
// has to wait. Nothing computes before it is handed out, so the pool must wait: where each operator
// is a program of its own, a training step takes 5 to 13 % less time.
#pragma once

namespace lazyxla::pjrt {

// Puts the compute threads, recognised by the name that XLA gives them, under Linux' policy for
// work that is not interactive (SCHED_BATCH): when one wakes up, it does not interrupt another
// thread. Does not change threads for which another policy than the usual one was set.
void yield_compute_threads();

// The same for the calling thread.
void yield_this_thread();

}  // namespace lazyxla::pjrt
