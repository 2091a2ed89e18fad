// Undoing: a flush is a transaction.
//
// A flush replaces the contents of storages by promises (program/buffer.h). Until its program has
// run, what they had before is kept, unless the program was given its memory. If the flush fails,
// at any stage, the storages have it again:
//
//     p.add_(g)    p: leaf A ──recorded──> node (A + g) ──flush──> promise B
//     B fails      p: leaf A; any other reader of B gets the reason
//
// A storage that had nothing before, since its tensor was made by what failed, keeps the broken
// promise: every read of it reports the reason.
//
// Work may have been recorded on B meanwhile, and flushed. It fails, too, as its input is missing,
// and what its storages had before is B. So a broken promise remembers what it stood for (A).
#pragma once

#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

#include "program/graph.h"

namespace lazyxla::graph {

// One of the storages that a graph took (program/graph.h), when the graph is gone: what is needed
// to undo a run. It does not own the promise, so that the run after it may consume that.
struct Replaced {
  uint64_t id;
  ir::Content content;  // not empty
  std::weak_ptr<program::DeviceBuffer> promise;
};

// Puts the random generators back to where they were before these draws, unless another draw came
// since.
void rewind(const std::vector<ir::Draws>& draws);

// Gives the storages what they had before. `was_run`: kept promises have failed, too. Those for
// which it is gone, given to the program that failed, are returned: the addresses of their tensors'
// memory. Takes the device's mutex.
std::vector<const void*> undo(c10::DeviceIndex device, std::vector<Replaced> replaced,
                              bool was_run);

}  // namespace lazyxla::graph
