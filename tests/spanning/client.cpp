// Making a client: a CPU client of all processes' devices, of which those of one are addressable.
#include <map>
#include <set>

#include "call.h"
#include "state.h"

namespace spanning {
namespace {

// The options that are ours; all others go to the CPU plugin.
class Options {
 public:
  explicit Options(const PJRT_Client_Create_Args& args) {
    for (size_t i = 0; i < args.num_options; ++i) {
      const PJRT_NamedValue& option = args.create_options[i];
      const std::string name(option.name, option.name_size);
      if (!kOwn.contains(name)) {
        others_.push_back(option);
        continue;
      }
      if (option.type != PJRT_NamedValue_kInt64) {
        fail(PJRT_Error_Code_INVALID_ARGUMENT, "the option " + name + " is an int64");
      }
      values_[name] = option.int64_value;
    }
  }

  int at_least(const char* name, int64_t fewest, int64_t otherwise) const {
    const auto found = values_.find(name);
    const int64_t value = found == values_.end() ? otherwise : found->second;
    if (value < fewest || value > kMost) {
      fail(PJRT_Error_Code_INVALID_ARGUMENT,
           std::string("the option ") + name + " is " + std::to_string(value));
    }
    return static_cast<int>(value);
  }

  // For a CPU client of `count` devices.
  std::vector<PJRT_NamedValue> of_cpu(int count) const {
    std::vector<PJRT_NamedValue> options = others_;
    PJRT_NamedValue& devices = options.emplace_back();
    devices.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    devices.name = kDeviceCount.data();
    devices.name_size = kDeviceCount.size();
    devices.type = PJRT_NamedValue_kInt64;
    devices.int64_value = count;
    devices.value_size = 1;
    return options;
  }

 private:
  static constexpr int64_t kMost = 1 << 30;
  inline static const std::string kDeviceCount = "cpu_device_count";
  inline static const std::set<std::string> kOwn = {"node_id", "num_nodes", kDeviceCount,
                                                    "meet_timeout_ms"};
  std::map<std::string, int64_t> values_;
  std::vector<PJRT_NamedValue> others_;
};

std::string start_key(int process) { return "spanning/start/" + std::to_string(process); }

// Tells the other processes that this one is here, and waits for them, as plugins do that exchange
// what devices each process has.
void meet(const Client& client) {
  if (client.store.has(start_key(client.node))) {
    fail(PJRT_Error_Code_INVALID_ARGUMENT,
         "another client has started as process " + std::to_string(client.node));
  }
  const std::string shape = std::to_string(client.nodes) + " processes of " +
                            std::to_string(client.devices_per_node) + " devices";
  client.store.put(start_key(client.node), shape);
  for (int process = 0; process < client.nodes; ++process) {
    if (process == client.node) continue;
    std::string theirs;
    PJRT_Error* error =
        guarded([&] { theirs = client.store.get(start_key(process), client.timeout_ms); });
    if (error != nullptr) {
      const std::string why = message_of(error);
      const PJRT_Error_Code code = code_of(error);
      destroy(error);
      fail(code, "process " + std::to_string(process) + " did not start: " + why);
    }
    if (theirs != shape) {
      fail(PJRT_Error_Code_INVALID_ARGUMENT,
           "process " + std::to_string(process) + " started " + theirs + ", this one " + shape);
    }
  }
}

PJRT_DeviceDescription* description_of(PJRT_Device* device) {
  SPANNING_ARGS(args, PJRT_Device_GetDescription);
  args.device = device;
  SPANNING_CALL(PJRT_Device_GetDescription, args);
  return args.device_description;
}

int id_of(PJRT_DeviceDescription* description) {
  SPANNING_ARGS(args, PJRT_DeviceDescription_Id);
  args.device_description = description;
  SPANNING_CALL(PJRT_DeviceDescription_Id, args);
  return args.id;
}

// Divides the CPU client's devices, and what belongs to them, among the processes.
void divide_devices(Client& client) {
  SPANNING_ARGS(all, PJRT_Client_Devices);
  all.client = client.raw;
  SPANNING_CALL(PJRT_Client_Devices, all);
  for (size_t i = 0; i < all.num_devices; ++i) {
    PJRT_Device* raw = all.devices[i];
    PJRT_DeviceDescription* description = description_of(raw);
    const Device device{&client, id_of(description)};
    state().add_device(raw, device);
    state().add_description(description, device);
    SPANNING_ARGS(memories, PJRT_Device_AddressableMemories);
    memories.device = raw;
    SPANNING_CALL(PJRT_Device_AddressableMemories, memories);
    for (size_t k = 0; k < memories.num_memories; ++k) {
      state().add_memory(memories.memories[k], raw);
      if (device.is_addressable()) client.addressable_memories.push_back(memories.memories[k]);
    }
    if (device.is_addressable()) client.addressable_devices.push_back(raw);
  }
  // The topology describes the same devices with objects of its own.
  SPANNING_ARGS(topology, PJRT_Client_TopologyDescription);
  topology.client = client.raw;
  SPANNING_CALL(PJRT_Client_TopologyDescription, topology);
  SPANNING_ARGS(described, PJRT_TopologyDescription_GetDeviceDescriptions);
  described.topology = topology.topology;
  SPANNING_CALL(PJRT_TopologyDescription_GetDeviceDescriptions, described);
  for (size_t i = 0; i < described.num_descriptions; ++i) {
    PJRT_DeviceDescription* description = described.descriptions[i];
    state().add_description(description, Device{&client, id_of(description)});
  }
}

PJRT_Error* destroy_raw(PJRT_Client* raw) {
  SPANNING_ARGS(args, PJRT_Client_Destroy);
  args.client = raw;
  return cpu()->PJRT_Client_Destroy(&args);
}

PJRT_Error* create(PJRT_Client_Create_Args* args) {
  return guarded([&] {
    const Options options(*args);
    auto client = std::make_unique<Client>(*args);
    client->nodes = options.at_least("num_nodes", 1, 1);
    client->node = options.at_least("node_id", 0, 0);
    client->devices_per_node = options.at_least("cpu_device_count", 1, 1);
    client->timeout_ms = options.at_least("meet_timeout_ms", 1, 60000);
    if (client->node >= client->nodes) {
      fail(PJRT_Error_Code_INVALID_ARGUMENT,
           "node_id is " + std::to_string(client->node) + " of " + std::to_string(client->nodes));
    }
    if (client->nodes > 1) {
      if (!client->store.is_given()) {
        fail(PJRT_Error_Code_INVALID_ARGUMENT,
             "a client of several processes needs the key-value callbacks to meet the others");
      }
      meet(*client);
    }
    const std::vector<PJRT_NamedValue> of_cpu =
        options.of_cpu(client->nodes * client->devices_per_node);
    SPANNING_ARGS(own, PJRT_Client_Create);
    own.create_options = of_cpu.data();
    own.num_options = of_cpu.size();
    SPANNING_CALL(PJRT_Client_Create, own);
    client->raw = own.client;
    if (PJRT_Error* error = guarded([&] { divide_devices(*client); })) {
      if (PJRT_Error* another = destroy_raw(own.client)) destroy(another);
      throw Failure{error};
    }
    state().add_client(std::move(client));
    args->client = own.client;
  });
}

PJRT_Error* destroy_client(PJRT_Client_Destroy_Args* args) {
  state().remove_client(args->client);
  return cpu()->PJRT_Client_Destroy(args);
}

}  // namespace

void wrap_clients(PJRT_Api& api) {
  api.PJRT_Client_Create = &create;
  api.PJRT_Client_Destroy = &destroy_client;
}

}  // namespace spanning
