// Our client for another library in the process, such as JAX: both then use one device, which on a
// TPU a second client could not, and hand each other arrays without a copy.
//
// A client cannot be handed over; a library makes its own through a plugin's functions. So it gets
// our plugin with a few functions replaced: the client that it creates is the existing one, and is
// not destroyed. PJRT has no function that passes buffers between clients, so two others do it: the
// library is given an array that seems to be in the host's memory, and when it copies it to the
// device, it gets our buffer instead; or it is asked for an array's address, and we see the buffer.
//
// A buffer that both hold is shared: if one releases it, the other keeps it, and no execution of
// either consumes it.
#pragma once

#include <pjrt_c_api.h>

#include <atomic>
#include <functional>

namespace lazyxla::pjrt {

class Buffer;

// The plugin for the other library. Starts the client.
const PJRT_Api& shared_api();

// Lends it our buffer: `take` makes the library copy an array of the same type and shape to the
// device, in this thread. Throws Error if it does not.
void lend(const Buffer& buffer, const std::function<void()>& take);

// The buffer of the library's whose address `ask` asks for, in this thread. Throws Error if it
// does not.
Buffer borrow(const std::function<void()>& ask);

namespace shared {
extern std::atomic<int> count;  // of the buffers that are
bool is_shared(PJRT_Buffer* buffer);
bool let_go(PJRT_Buffer* buffer);
}  // namespace shared

inline bool is_shared(PJRT_Buffer* buffer) {
  return shared::count.load(std::memory_order_acquire) != 0 && shared::is_shared(buffer);
}

// Ends one side's hold on a buffer; false if it is not shared: the caller then destroys it.
inline bool let_go(PJRT_Buffer* buffer) {
  return shared::count.load(std::memory_order_acquire) != 0 && shared::let_go(buffer);
}

}  // namespace lazyxla::pjrt
