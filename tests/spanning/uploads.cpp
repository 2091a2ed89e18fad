// Buffers are made on devices of this process only.
//
// Each function refuses other devices and is otherwise the CPU plugin's.
#include "call.h"
#include "state.h"

namespace spanning {
namespace {

// Of a buffer that goes to `memory`, or, where that is null, to the default memory of `device`.
void check_addressable(PJRT_Device* device, PJRT_Memory* memory) {
  const Device* target = state().device(memory == nullptr ? device : state().device_of(memory));
  if (target == nullptr || target->is_addressable()) return;
  fail(PJRT_Error_Code_INVALID_ARGUMENT,
       "a buffer on a device of process " + std::to_string(target->process()) + ", which process " +
           std::to_string(target->client->node) + " cannot address");
}

PJRT_Error* from_host_buffer(PJRT_Client_BufferFromHostBuffer_Args* args) {
  return guarded([&] {
    check_addressable(args->device, args->memory);
    check(cpu()->PJRT_Client_BufferFromHostBuffer(args));
  });
}

PJRT_Error* uninitialized_buffer(PJRT_Client_CreateUninitializedBuffer_Args* args) {
  return guarded([&] {
    check_addressable(args->device, args->memory);
    check(cpu()->PJRT_Client_CreateUninitializedBuffer(args));
  });
}

PJRT_Error* alias_buffer(PJRT_Client_CreateAliasBuffer_Args* args) {
  return guarded([&] {
    check_addressable(nullptr, args->memory);
    check(cpu()->PJRT_Client_CreateAliasBuffer(args));
  });
}

PJRT_Error* view_of_device_buffer(PJRT_Client_CreateViewOfDeviceBuffer_Args* args) {
  return guarded([&] {
    const bool tells = SPANNING_HAS(args, PJRT_Client_CreateViewOfDeviceBuffer_Args, memory);
    check_addressable(args->device, tells ? args->memory : nullptr);
    check(cpu()->PJRT_Client_CreateViewOfDeviceBuffer(args));
  });
}

PJRT_Error* buffers_for_transfer(PJRT_Client_CreateBuffersForAsyncHostToDevice_Args* args) {
  return guarded([&] {
    check_addressable(nullptr, args->memory);
    check(cpu()->PJRT_Client_CreateBuffersForAsyncHostToDevice(args));
  });
}

PJRT_Error* copy_to_device(PJRT_Buffer_CopyToDevice_Args* args) {
  return guarded([&] {
    check_addressable(args->dst_device, nullptr);
    check(cpu()->PJRT_Buffer_CopyToDevice(args));
  });
}

PJRT_Error* copy_to_memory(PJRT_Buffer_CopyToMemory_Args* args) {
  return guarded([&] {
    check_addressable(nullptr, args->dst_memory);
    check(cpu()->PJRT_Buffer_CopyToMemory(args));
  });
}

}  // namespace

void wrap_uploads(PJRT_Api& api) {
  api.PJRT_Client_BufferFromHostBuffer = &from_host_buffer;
  api.PJRT_Client_CreateUninitializedBuffer = &uninitialized_buffer;
  api.PJRT_Client_CreateAliasBuffer = &alias_buffer;
  api.PJRT_Client_CreateViewOfDeviceBuffer = &view_of_device_buffer;
  api.PJRT_Client_CreateBuffersForAsyncHostToDevice = &buffers_for_transfer;
  api.PJRT_Buffer_CopyToDevice = &copy_to_device;
  api.PJRT_Buffer_CopyToMemory = &copy_to_memory;
}

}  // namespace spanning
