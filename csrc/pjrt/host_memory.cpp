#include "host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iterator>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace lazyxla::pjrt {

void keep_freed_memory() {
#ifdef __GLIBC__
  for (const char* name :
       {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"}) {
    if (std::getenv(name) != nullptr) {
      return;
    }
  }
  mallopt(M_MMAP_THRESHOLD, 256 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  // As large as the heaps of threads' arenas: such a heap is unmapped once it is empty, unless it
  // has no more than this to give back.
  mallopt(M_TOP_PAD, 64 << 20);
#endif
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

}  // namespace lazyxla::pjrt
