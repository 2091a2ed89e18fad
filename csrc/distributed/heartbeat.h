// Whether the processes live whose devices are shared (pjrt/processes.h).
//
// Devices that wait in a program for those of a process that has ended wait for ever, and nothing
// that was compared before (agreement.h) ends that. So a thread of each process tells now and then,
// through the store, that its process is there, and watches the next one:
//
//     process 0 ──watches──> process 1 ──watches──> process 2 ──watches──> process 0
//
// Whoever finds that one is gone tells all others, where whatever waits is given up
// (common/waiting.h). A process that is late is no such process: its thread goes on. If the store
// itself is gone, nobody can tell; torchrun holds it in a process of its own.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <vector>

namespace lazyxla::distributed {

// Starts the thread, once. Who is silent for `timeout`, or for 100 seconds if that is less, is
// gone.
void start_heartbeat(c10::intrusive_ptr<c10d::Store> store, size_t member, size_t members,
                     std::chrono::milliseconds timeout);

// This process leaves, and nobody is to miss it. No-op if there is no thread.
void stop_heartbeat();

}  // namespace lazyxla::distributed
