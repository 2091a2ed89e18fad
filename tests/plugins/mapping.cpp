// The CPU's plugin (PLUGIN), with host memory that can be mapped, up to 4,000 bytes at a time: for
// tests/test_pinned_memory.py.
//
// On stderr it tells what it maps, and of each copy to the device whether it may take until later.
// After stall() these do not end, until go_on().
#include <cstdio>
#include <mutex>
#include <set>
#include <vector>

#include "cpu.h"

namespace {

constexpr size_t kMost = 4000;

std::mutex mutex;
bool stalls = false;
std::set<PJRT_Event*> stalled;
std::vector<PJRT_Event_OnReady_Args> awaited;

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
  PJRT_Error* error = cpu()->PJRT_Client_BufferFromHostBuffer(args);
  std::lock_guard lock(mutex);
  if (stalls && later) stalled.insert(args->done_with_host_buffer);
  return error;
}

PJRT_Error* on_ready(PJRT_Event_OnReady_Args* args) {
  {
    std::lock_guard lock(mutex);
    if (stalled.erase(args->event)) {
      awaited.push_back(*args);
      return nullptr;
    }
  }
  return cpu()->PJRT_Event_OnReady(args);
}

}  // namespace

extern "C" void stall() {
  std::lock_guard lock(mutex);
  stalls = true;
}

extern "C" void go_on() {
  std::lock_guard lock(mutex);
  stalls = false;
  for (const PJRT_Event_OnReady_Args& args : awaited) args.callback(nullptr, args.user_arg);
  awaited.clear();
}

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = *cpu();
  api.PJRT_Client_DmaMap = &map;
  api.PJRT_Client_DmaUnmap = &unmap;
  api.PJRT_Client_BufferFromHostBuffer = &copy;
  api.PJRT_Event_OnReady = &on_ready;
  return &api;
}
