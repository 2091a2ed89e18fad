// Whether the processes that share devices (pjrt/processes.h) are alive.
//
// Devices that wait in a program for those of a process that has ended wait for ever, even if the
// launch was compared before (agreement.h). So a thread of each process reports now and then,
// through the store, that its process is alive, and watches the next one:
//
//     process 0 ──watches──> process 1 ──watches──> process 2 ──watches──> process 0
//
// A process that finds the next one gone reports it to all others, where all waits are given up
// (common/waiting.h). A process that is late is not gone: its thread still reports. If the store
// itself is gone, nothing is detected; torchrun holds it in a process of its own.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <vector>

namespace lazyxla::distributed {

// Starts the thread, once. A process that is silent for `timeout`, or for 100 seconds if that is
// less, is gone. The thread has a connection of its own to the store: whoever waits in a store
// keeps others from it.
void start_heartbeat(c10::intrusive_ptr<c10d::Store> store, size_t member, size_t members,
                     std::chrono::milliseconds timeout);

// This process leaves, and is not to be reported as gone. No-op if there is no thread. Not to be
// called in a forked child, which has none.
void stop_heartbeat();

}  // namespace lazyxla::distributed
