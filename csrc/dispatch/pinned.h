// Pinned host memory, as tensor.pin_memory() and DataLoader(pin_memory=True) ask for it.
//
// Nothing needs page-locked memory here: a transfer copies the host's data before it returns. So
// this is the CPU allocator, plus a record of the blocks it gave out, for tensor.is_pinned() to
// answer truly.
#pragma once

#include <c10/core/Allocator.h>

namespace lazyxla::dispatch {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

}  // namespace lazyxla::dispatch
