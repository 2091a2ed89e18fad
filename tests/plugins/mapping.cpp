// The CPU's plugin (PLUGIN), with host memory that can be mapped, up to 4,000 bytes at a time: for
// tests/test_pinned_memory.py.
//
// On stderr it tells what it maps, and of each copy to the device whether it may take until later.
#include <cstdio>

#include "cpu.h"

namespace {

constexpr size_t kMost = 4000;

PJRT_Error* map(PJRT_Client_DmaMap_Args* args) {
  if (args->size > kMost) return cpu()->PJRT_Client_DmaMap(args);  // which maps nothing
  std::fprintf(stderr, "map %zu\n", args->size);
  return nullptr;
}

PJRT_Error* unmap(PJRT_Client_DmaUnmap_Args*) {
  std::fprintf(stderr, "unmap\n");
  return nullptr;
}

PJRT_Error* copy(PJRT_Client_BufferFromHostBuffer_Args* args) {
  const bool later =
      args->host_buffer_semantics == PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes;
  std::fprintf(stderr, "copy %s\n", later ? "later" : "now");
  return cpu()->PJRT_Client_BufferFromHostBuffer(args);
}

}  // namespace

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = *cpu();
  api.PJRT_Client_DmaMap = &map;
  api.PJRT_Client_DmaUnmap = &unmap;
  api.PJRT_Client_BufferFromHostBuffer = &copy;
  return &api;
}
