// The threads that run backward passes.
//
// PyTorch runs the operators of a backward pass on a thread of the device's own. When the pass is
// over, that thread may hold results for a moment longer than the caller of the pass: what is
// alive, and so computed, would depend on which thread is faster. Programs of several processes
// must be the same in all of them, so a flush waits until the thread has let go of what it had,
// which takes 16 microseconds (AMD EPYC, two processes of the test plugin).
#pragma once

#include <c10/core/Device.h>

namespace lazyxla::record {

// No-op within a backward pass.
void await_backward_thread(c10::DeviceIndex device);

}  // namespace lazyxla::record
