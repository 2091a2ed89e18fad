#include "pjrt/shared_client.h"

#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/locks.h"
#include "pjrt/call.h"
#include "pjrt/client.h"
#include "pjrt/runtime.h"

namespace lazyxla::pjrt {
namespace shared {

std::atomic<int> count{0};

namespace {

// By buffer: how many hold it besides one.
auto& holders = *new Guarded<std::unordered_map<PJRT_Buffer*, int>>();

void add_holder(PJRT_Buffer* buffer) {
  if ((*holders.hold())[buffer]++ == 0) ++count;
}

}  // namespace

bool is_shared(PJRT_Buffer* buffer) { return holders.hold()->contains(buffer); }

bool let_go(PJRT_Buffer* buffer) {
  const auto others = holders.hold();
  const auto found = others->find(buffer);
  if (found == others->end()) return false;
  if (--found->second == 0) {
    others->erase(found);
    --count;
  }
  return true;
}

}  // namespace shared

namespace {

const PJRT_Api& original() { return Runtime::get().client().api(); }

// Per thread: the buffer that the library is to take next, and the one that it asked for last.
thread_local PJRT_Buffer* lent = nullptr;
thread_local PJRT_Buffer* asked_for = nullptr;

PJRT_Error* initialize(PJRT_Plugin_Initialize_Args*) { return nullptr; }  // it is

PJRT_Error* create_client(PJRT_Client_Create_Args* args) {
  args->client = Runtime::get().client().raw();
  return nullptr;
}

PJRT_Error* destroy_client(PJRT_Client_Destroy_Args*) { return nullptr; }

PJRT_Error* copy_from_host(PJRT_Client_BufferFromHostBuffer_Args* args) {
  PJRT_Buffer* buffer = std::exchange(lent, nullptr);
  if (!buffer) return original().PJRT_Client_BufferFromHostBuffer(args);
  LAZYXLA_PJRT_ARGS(ready, PJRT_Buffer_ReadyEvent, buffer, buffer);
  if (PJRT_Error* error = original().PJRT_Buffer_ReadyEvent(&ready)) return error;
  shared::add_holder(buffer);
  args->done_with_host_buffer = ready.event;
  args->buffer = buffer;
  return nullptr;
}

PJRT_Error* address(PJRT_Buffer_UnsafePointer_Args* args) {
  asked_for = args->buffer;
  return original().PJRT_Buffer_UnsafePointer(args);
}

PJRT_Error* destroy(PJRT_Buffer_Destroy_Args* args) {
  return let_go(args->buffer) ? nullptr : original().PJRT_Buffer_Destroy(args);
}

PJRT_Error* free_memory(PJRT_Buffer_Delete_Args* args) {
  return is_shared(args->buffer) ? nullptr : original().PJRT_Buffer_Delete(args);
}

// Which of the arguments are shared, and those that the caller keeps.
std::vector<int64_t> kept(const PJRT_LoadedExecutable_Execute_Args& args) {
  std::vector<int64_t> found(
      args.options->non_donatable_input_indices,
      args.options->non_donatable_input_indices + args.options->num_non_donatable_input_indices);
  const size_t given = found.size();
  for (size_t i = 0; i < args.num_args; ++i) {
    for (size_t device = 0; device < args.num_devices; ++device) {
      if (!is_shared(args.argument_lists[device][i])) continue;
      found.push_back(static_cast<int64_t>(i));
      break;
    }
  }
  if (found.size() == given) found.clear();
  return found;
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  const auto run = original().PJRT_LoadedExecutable_Execute;
  if (shared::count.load(std::memory_order_acquire) == 0) return run(args);
  const std::vector<int64_t> indices = kept(*args);
  if (indices.empty()) return run(args);
  // In its own size: the library may know more options than we do.
  const size_t size = args->options->struct_size;
  const auto copy = std::make_unique<std::max_align_t[]>(size / sizeof(std::max_align_t) + 1);
  std::memcpy(copy.get(), args->options, size);
  PJRT_ExecuteOptions* const theirs = args->options;
  args->options = reinterpret_cast<PJRT_ExecuteOptions*>(copy.get());
  args->options->non_donatable_input_indices = indices.data();
  args->options->num_non_donatable_input_indices = indices.size();
  PJRT_Error* error = run(args);
  args->options = theirs;
  return error;
}

const Device& device_of(PJRT_Buffer* buffer) {
  LAZYXLA_PJRT_QUERY(args, &original(), PJRT_Buffer_Device, buffer, buffer);
  for (const Device& device : Runtime::get().client().devices()) {
    if (device.raw() == args.device) return device;
  }
  throw Error(PJRT_Error_Code_INVALID_ARGUMENT, "an array lies on a device of another process");
}

}  // namespace

const PJRT_Api& shared_api() {
  static const PJRT_Api* const api = [] {
    const size_t size = original().struct_size;  // that of the plugin's version
    auto* memory = new std::max_align_t[size / sizeof(std::max_align_t) + 1];
    std::memcpy(memory, &original(), size);
    auto* made = reinterpret_cast<PJRT_Api*>(memory);
    made->PJRT_Plugin_Initialize = &initialize;
    made->PJRT_Client_Create = &create_client;
    made->PJRT_Client_Destroy = &destroy_client;
    made->PJRT_Client_BufferFromHostBuffer = &copy_from_host;
    made->PJRT_Buffer_UnsafePointer = &address;
    made->PJRT_Buffer_Destroy = &destroy;
    made->PJRT_Buffer_Delete = &free_memory;
    made->PJRT_LoadedExecutable_Execute = &execute;
    return made;
  }();
  return *api;
}

void lend(const Buffer& buffer, const std::function<void()>& take) {
  lent = buffer.raw();
  try {
    take();
  } catch (...) {
    lent = nullptr;
    throw;
  }
  if (std::exchange(lent, nullptr)) {
    throw Error(PJRT_Error_Code_INTERNAL, "the other library took no buffer");
  }
}

Buffer borrow(const std::function<void()>& ask) {
  asked_for = nullptr;
  ask();
  PJRT_Buffer* buffer = std::exchange(asked_for, nullptr);
  if (!buffer) {
    throw Error(PJRT_Error_Code_INTERNAL, "the other library has no buffer of this client's");
  }
  const Device& device = device_of(buffer);
  shared::add_holder(buffer);
  return Buffer::adopt(device, buffer);
}

}  // namespace lazyxla::pjrt
