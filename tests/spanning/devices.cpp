// What a client of one process among several says of the devices.
//
// Each function asks the CPU plugin first, which checks the arguments, and then corrects the
// answer.
#include <algorithm>

#include "call.h"
#include "state.h"

namespace spanning {
namespace {

[[noreturn]] void fail_not_addressable(const Device& device, const char* what) {
  fail(PJRT_Error_Code_INVALID_ARGUMENT,
       std::string(what) + " of a device of process " + std::to_string(device.process()) +
           ", which process " + std::to_string(device.client->node) + " cannot address");
}

PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Client_ProcessIndex(args));
    if (const Client* client = state().client(args->client)) args->process_index = client->node;
  });
}

PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Client_AddressableDevices(args));
    if (const Client* client = state().client(args->client)) {
      args->addressable_devices = client->addressable_devices.data();
      args->num_addressable_devices = client->addressable_devices.size();
    }
  });
}

PJRT_Error* addressable_memories(PJRT_Client_AddressableMemories_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Client_AddressableMemories(args));
    if (const Client* client = state().client(args->client)) {
      args->addressable_memories = client->addressable_memories.data();
      args->num_addressable_memories = client->addressable_memories.size();
    }
  });
}

// Hardware ids count a process' own devices, as on a host with accelerators.
PJRT_Error* lookup_addressable_device(PJRT_Client_LookupAddressableDevice_Args* args) {
  return guarded([&] {
    const Client* client = state().client(args->client);
    const int id = args->local_hardware_id;
    if (client == nullptr) return check(cpu()->PJRT_Client_LookupAddressableDevice(args));
    if (id < 0 || static_cast<size_t>(id) >= client->addressable_devices.size()) {
      fail(PJRT_Error_Code_INVALID_ARGUMENT, "process " + std::to_string(client->node) +
                                                 " has no device with the hardware id " +
                                                 std::to_string(id));
    }
    args->addressable_device = client->addressable_devices[id];
  });
}

PJRT_Error* local_hardware_id(PJRT_Device_LocalHardwareId_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Device_LocalHardwareId(args));
    const Device* device = state().device(args->device);
    if (device == nullptr) return;
    const auto& own = device->client->addressable_devices;
    const auto found = std::find(own.begin(), own.end(), args->device);
    args->local_hardware_id = found == own.end() ? -1 : static_cast<int>(found - own.begin());
  });
}

PJRT_Error* is_addressable(PJRT_Device_IsAddressable_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Device_IsAddressable(args));
    if (const Device* device = state().device(args->device)) {
      args->is_addressable = device->is_addressable();
    }
  });
}

PJRT_Error* device_memories(PJRT_Device_AddressableMemories_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Device_AddressableMemories(args));
    const Device* device = state().device(args->device);
    if (device != nullptr && !device->is_addressable()) {
      args->memories = nullptr;
      args->num_memories = 0;
    }
  });
}

PJRT_Error* default_memory(PJRT_Device_DefaultMemory_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Device_DefaultMemory(args));
    const Device* device = state().device(args->device);
    if (device != nullptr && !device->is_addressable()) fail_not_addressable(*device, "the memory");
  });
}

PJRT_Error* memory_stats(PJRT_Device_MemoryStats_Args* args) {
  return guarded([&] {
    const Device* device = state().device(args->device);
    if (device != nullptr && !device->is_addressable()) {
      fail_not_addressable(*device, "memory statistics");
    }
    check(cpu()->PJRT_Device_MemoryStats(args));
  });
}

PJRT_Error* process_of_device(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_DeviceDescription_ProcessIndex(args));
    if (const Device* device = state().device(args->device_description)) {
      args->process_index = device->process();
    }
  });
}

}  // namespace

// On several processes a program of no given devices is for those here, if they are enough.
PJRT_Error* default_device_assignment(PJRT_Client_DefaultDeviceAssignment_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Client_DefaultDeviceAssignment(args));
    const Client* client = state().client(args->client);
    const int count = args->num_replicas * args->num_partitions;
    if (client == nullptr || count > client->devices_per_node) return;
    for (int i = 0; i < count; ++i) {
      args->default_assignment[i] = client->node * client->devices_per_node + i;
    }
  });
}

void wrap_devices(PJRT_Api& api) {
  api.PJRT_Client_ProcessIndex = &process_index;
  api.PJRT_Client_AddressableDevices = &addressable_devices;
  api.PJRT_Client_AddressableMemories = &addressable_memories;
  api.PJRT_Client_LookupAddressableDevice = &lookup_addressable_device;
  api.PJRT_Client_DefaultDeviceAssignment = &default_device_assignment;
  api.PJRT_Device_IsAddressable = &is_addressable;
  api.PJRT_Device_LocalHardwareId = &local_hardware_id;
  api.PJRT_Device_AddressableMemories = &device_memories;
  api.PJRT_Device_DefaultMemory = &default_memory;
  api.PJRT_Device_MemoryStats = &memory_stats;
  api.PJRT_DeviceDescription_ProcessIndex = &process_of_device;
}

}  // namespace spanning
