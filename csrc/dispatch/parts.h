// Work in parts on the plugin's own threads, which run the rest of the program, too.
//
// A kernel in parallel by OpenMP has others: after a call they wait for the next one for up to a
// millisecond, on the processors that the program needs.
#pragma once

#include <cstdint>
#include <functional>

struct XLA_FFI_CallFrame;  // of xla/ffi/api/c_api.h

namespace lazyxla::dispatch {

// How many parts can run at once: as many as the plugin has threads, and no more than the user's
// number of threads.
int64_t most_parts(const XLA_FFI_CallFrame& frame);

// Runs `work(i)` for every i below `count` and waits; PyTorch's kernels in it use one thread.
// Throws what a part throws, the first of them if several do.
void run_parts(const XLA_FFI_CallFrame& frame, int64_t count,
               const std::function<void(int64_t)>& work);

}  // namespace lazyxla::dispatch
