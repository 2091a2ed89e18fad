// What this library knows of the CPU plugin's objects, found by their addresses.
#pragma once

#include <pjrt_c_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "store.h"

namespace spanning {

// The executions on one set of devices, which all processes launch in the same order.
struct Group {
  std::mutex mutex;  // one execution at a time
  int64_t runs = 0;
  std::string broken;    // why nothing can run any more: a process did not come
  std::string last_key;  // of this process' record of the run before
};

struct Client {
  explicit Client(const PJRT_Client_Create_Args& args) : store(args) {}

  PJRT_Client* raw = nullptr;  // the CPU plugin's, of all processes' devices
  int node = 0;
  int nodes = 1;
  int devices_per_node = 1;
  int timeout_ms = 0;
  Store store;
  std::vector<PJRT_Device*> addressable_devices;
  std::vector<PJRT_Memory*> addressable_memories;

  std::mutex launching;  // two programs start on all devices in the same order
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Group>> groups;  // by the devices' ids

  Group& group(const std::string& ids);
};

struct Device {
  Client* client = nullptr;
  int id = 0;
  int process() const { return id / client->devices_per_node; }
  bool is_addressable() const { return process() == client->node; }
};

// A loaded executable.
struct Program {
  Client* client = nullptr;
  uint64_t fingerprint = 0;  // of the program and its devices, in order, if it spans processes
  std::vector<PJRT_Device*> devices;  // of all processes, in the order of replicas and partitions
  std::vector<int> process_of;        // each
  std::vector<PJRT_Device*> addressable_devices;
  std::vector<int> processes;  // which take part, in order
  std::string ids;             // of the devices, in order of number: "0,1,2,3"
  size_t num_outputs = 0;

  bool spans_processes() const { return processes.size() > 1; }
};

// All maps. A lookup of what is not known here (an executable for one device of any kind, a
// topology that no client made) returns null: the CPU plugin's answer is then the answer.
class State {
 public:
  void add_client(std::unique_ptr<Client> client);
  void remove_client(PJRT_Client* raw);
  Client* client(PJRT_Client* raw);

  void add_device(PJRT_Device* raw, Device device);
  const Device* device(PJRT_Device* raw);
  void add_description(PJRT_DeviceDescription* raw, Device device);
  const Device* device(PJRT_DeviceDescription* raw);
  void add_memory(PJRT_Memory* raw, PJRT_Device* device);
  PJRT_Device* device_of(PJRT_Memory* raw);

  void add_program(PJRT_LoadedExecutable* raw, std::shared_ptr<const Program> program);
  void remove_program(PJRT_LoadedExecutable* raw);
  std::shared_ptr<const Program> program(PJRT_LoadedExecutable* raw);
  std::optional<uint64_t> code_hash(PJRT_Executable* raw);

 private:
  std::mutex mutex_;
  std::map<PJRT_Client*, std::unique_ptr<Client>> clients_;
  std::map<PJRT_Device*, Device> devices_;
  std::map<PJRT_DeviceDescription*, Device> descriptions_;
  std::map<PJRT_Memory*, PJRT_Device*> memories_;
  std::map<PJRT_LoadedExecutable*, std::shared_ptr<const Program>> programs_;
};

State& state();

// The devices of a program that tells none; the function of the C API.
PJRT_Error* default_device_assignment(PJRT_Client_DefaultDeviceAssignment_Args* args);

// How many executions over several processes were launched.
int64_t runs();

// The functions of the table that each file here replaces.
void wrap_clients(PJRT_Api& api);
void wrap_devices(PJRT_Api& api);
void wrap_uploads(PJRT_Api& api);
void wrap_programs(PJRT_Api& api);
void wrap_execution(PJRT_Api& api);

}  // namespace spanning
