// A PJRT plugin, for tests, whose clients span several processes.
//
// On a pod of TPUs there is one process per host. Each has a PJRT client that knows the devices of
// all, can address those of its own host, and runs with the other processes programs that are for
// devices of several. No such hardware is needed here: this plugin wraps the CPU's.
//
//   process 0:  client with CPU devices  [0] [1]  2   3     [d]: addressable
//   process 1:  client with CPU devices   0   1  [2] [3]     d : a stand-in for the other's
//
// What is wrapped, and where:
//   client.cpp     a client of all processes' devices; the processes meet in a key-value store
//   devices.cpp    who has which devices and memories
//   uploads.cpp    buffers are made on a process' own devices only
//   programs.cpp   executables: their devices, and fingerprints of the programs
//   execution.cpp  an execution over several processes: arguments are exchanged through the store,
//                  and each process runs the whole program
//   errors.cpp     errors made here beside the CPU plugin's
// All else is the CPU plugin's: its table is copied, and its objects pass through as they are.
//
// A client is created with the int64 options node_id and num_nodes (of this process, and how many
// there are), cpu_device_count (of each; 1 unless given) and meet_timeout_ms (60000 unless given: how long
// one waits for another process), and with the key-value callbacks if there are several processes.
// Other options go to the CPU plugin. The environment variable LAZYXLA_SPANNING_CPU_PLUGIN tells
// the CPU plugin's path; without it the one counts that this library was built for.
//
// What it proves: that all processes launch the same programs in the same order on the same
// devices, with the right buffers, which are the right shards, and that programs, collectives
// included, compute what they should. Processes that differ get an error where hardware would
// hang or compute nonsense. What it does not prove: anything of speed or of a real transport, nor
// that nothing waits: an execution here returns once all processes have launched it, on hardware
// once it is enqueued. Values differ from one device's as those of a CPU do.
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "call.h"
#include "state.h"

#define SPANNING_EXPORT extern "C" __attribute__((visibility("default")))

namespace spanning {
namespace {

const PJRT_Api* load_cpu() {
  const char* path = std::getenv("LAZYXLA_SPANNING_CPU_PLUGIN");
  if (path == nullptr) path = SPANNING_CPU_PLUGIN;
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  void* get_api = library == nullptr ? nullptr : dlsym(library, "GetPjrtApi");
  if (get_api == nullptr) {
    std::fprintf(stderr, "the CPU plugin cannot be loaded: %s\n", dlerror());
    return nullptr;
  }
  return reinterpret_cast<const PJRT_Api* (*)()>(get_api)();
}

}  // namespace

const PJRT_Api* cpu() {
  static const PJRT_Api* api = load_cpu();
  return api;
}

}  // namespace spanning

// How many executions over several processes this one has launched.
SPANNING_EXPORT int64_t spanning_run_count() { return spanning::runs(); }

SPANNING_EXPORT const PJRT_Api* GetPjrtApi() {
  static const PJRT_Api* api = []() -> const PJRT_Api* {
    if (spanning::cpu() == nullptr) return nullptr;
    static PJRT_Api wrapped{};
    const size_t size = std::min(spanning::cpu()->struct_size, sizeof(wrapped));
    std::memcpy(&wrapped, spanning::cpu(), size);
    wrapped.struct_size = size;
    spanning::wrap_errors(wrapped);
    spanning::wrap_clients(wrapped);
    spanning::wrap_devices(wrapped);
    spanning::wrap_uploads(wrapped);
    spanning::wrap_programs(wrapped);
    spanning::wrap_execution(wrapped);
    return &wrapped;
  }();
  return api;
}
