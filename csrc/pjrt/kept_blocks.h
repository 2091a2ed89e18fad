// Large blocks of memory of the CPU plugin, kept when they are freed.
//
// XLA's CPU client allocates a program's temporary memory and its results anew for each execution,
// on its own threads. glibc maps what the heaps of threads (64 MiB) cannot hold from the system
// each time, and each execution pays a page fault for every 4 KiB: a quarter of the processor time
// of a training step of ConvNeXt. In one heap for all threads such blocks fragment it: a loop was
// seen to grow by 3 GB in 200 rounds.
//
// The client takes no allocator. So the two functions by which it gets and frees blocks are
// replaced where the plugin calls them: in its table of imported functions (ELF's global offset
// table). No other library's calls change.
#pragma once

#include <cstdint>

namespace lazyxla::pjrt {

// Makes the library that has `address` use kept blocks. Does nothing on other processors than
// x86-64 and ARM's of 64 bits.
void keep_blocks_of(const void* address);

// Bytes of blocks that are kept and free.
int64_t kept_bytes();

// Gives them back to the system.
void release_kept_blocks();

}  // namespace lazyxla::pjrt
