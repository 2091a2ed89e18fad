// Memory of the CPU plugin: the process's own, from malloc.
//
// A program's arrays are allocated and freed in every step. glibc gives large blocks back to the
// system when they are freed, and the next step pays a page fault for every 4 KiB of them: about a
// fifth of the time of a training step. So it is set to keep them.
//
// A program's code is in memory mappings, several for a small program and many for a large one.
// Linux grants a process 65,530 of them, and XLA does not survive a refusal.
#pragma once

#include <cstdint>
#include <optional>

namespace lazyxla::pjrt {

// Makes malloc keep what is freed, blocks of up to 256 MiB and up to 1 GiB of unused memory, for
// the whole process; and the plugin, to which the address belongs, its large blocks
// (kept_blocks.h). Does not change what the user has set by MALLOC_..._ or GLIBC_TUNABLES
// variables, nor other allocators than glibc's.
void keep_freed_memory(const void* plugin);

// Whether the process has more than half of the memory mappings that it may have. Takes up to a few
// milliseconds.
bool mappings_run_out();

// The machine's memory, in bytes; empty if the system does not report it.
struct MachineMemory {
  int64_t available, total;
};
std::optional<MachineMemory> machine_memory();

// Bytes that this process can still get from the system, within its control group.
std::optional<int64_t> available_host_memory();

// The same with what it can use again: from the system, within its control group, and of what it
// has freed and kept; the last is left out if the rest are `needed` bytes already.
std::optional<int64_t> free_host_memory(int64_t needed);

}  // namespace lazyxla::pjrt
