#include "pjrt/host_memory.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>

#include "pjrt/kept_blocks.h"

namespace lazyxla::pjrt {

void keep_freed_memory(const void* plugin) {
  for (const char* name :
       {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) {
      return;
    }
  }
  mallopt(M_MMAP_THRESHOLD, 256 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  // As large as the heaps of threads' arenas: such a heap is unmapped once it is empty, unless that
  // frees no more than this.
  mallopt(M_TOP_PAD, 64 << 20);
  keep_blocks_of(plugin);
}

bool mappings_run_out() {
  std::ifstream granted("/proc/sys/vm/max_map_count");
  int64_t most = 0;
  if (!(granted >> most)) {
    return false;  // a system without such a limit
  }
  std::ifstream maps("/proc/self/maps");
  using Characters = std::istreambuf_iterator<char>;
  return std::count(Characters(maps), Characters(), '\n') > most / 2;
}

std::optional<MachineMemory> machine_memory() {
  std::ifstream lines("/proc/meminfo");
  std::optional<int64_t> available, total;
  std::string name, unit;
  for (int64_t kilobytes = 0; lines >> name >> kilobytes; std::getline(lines, unit)) {
    if (name == "MemTotal:") total = kilobytes * 1024;
    if (name == "MemAvailable:") available = kilobytes * 1024;
  }
  if (!available || !total) return std::nullopt;
  return MachineMemory{*available, *total};
}

namespace {

std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (!(file >> number)) return std::nullopt;  // also of "max"
  return number;
}

// The file pages of a control group, which are freed when memory is needed.
int64_t file_pages(const std::string& directory) {
  std::ifstream lines(directory + "memory.stat");
  int64_t sum = 0, bytes = 0;
  for (std::string name; lines >> name >> bytes;) {
    if (name == "active_file" || name == "inactive_file") sum += bytes;
  }
  return sum;
}

// What the process's control group (version 2, or 1) leaves it; empty if it has no limit.
std::optional<int64_t> left_in_group() {
  struct Group {
    const char *directory, *limit, *used;
  };
  for (const Group& group :
       {Group{"/sys/fs/cgroup/", "memory.max", "memory.current"},
        Group{"/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"}}) {
    const std::string directory = group.directory;
    const auto most = number_in(directory + group.limit), now = number_in(directory + group.used);
    if (most && now) return *most - *now + file_pages(directory);
  }
  return std::nullopt;
}

}  // namespace

std::optional<int64_t> available_host_memory() {
  const auto machine = machine_memory();
  if (!machine) return std::nullopt;
  const auto left = left_in_group();
  return left ? std::min(machine->available, *left) : machine->available;
}

std::optional<int64_t> free_host_memory(int64_t needed) {
  auto free = available_host_memory();
  if (!free) return std::nullopt;
  *free += kept_bytes();
  // It goes through all that was freed: milliseconds in a large process.
  if (*free < needed) *free += static_cast<int64_t>(mallinfo2().fordblks);
  return free;
}

}  // namespace lazyxla::pjrt
