// Executables: which devices of which processes they are for, and which program they are.
#include <set>
#include <string_view>

#include "call.h"
#include "fingerprint.h"
#include "options.h"
#include "state.h"

namespace spanning {
namespace {

// Frees what GetExecutable returns.
class Unloaded {
 public:
  explicit Unloaded(PJRT_LoadedExecutable* loaded) {
    SPANNING_ARGS(args, PJRT_LoadedExecutable_GetExecutable);
    args.loaded_executable = loaded;
    SPANNING_CALL(PJRT_LoadedExecutable_GetExecutable, args);
    raw_ = args.executable;
  }
  Unloaded(const Unloaded&) = delete;
  ~Unloaded() {
    SPANNING_ARGS(args, PJRT_Executable_Destroy);
    args.executable = raw_;
    if (PJRT_Error* error = cpu()->PJRT_Executable_Destroy(&args)) destroy(error);
  }

  size_t num_outputs() const {
    SPANNING_ARGS(args, PJRT_Executable_NumOutputs);
    args.executable = raw_;
    SPANNING_CALL(PJRT_Executable_NumOutputs, args);
    return args.num_outputs;
  }

  // The compiled program, an HloModuleProtoWithConfig.
  std::string optimized_program() const {
    PJRT_Program program{};
    program.struct_size = PJRT_Program_STRUCT_SIZE;
    SPANNING_ARGS(args, PJRT_Executable_OptimizedProgram);
    args.executable = raw_;
    args.program = &program;
    SPANNING_CALL(PJRT_Executable_OptimizedProgram, args);  // tells the size
    std::string code(program.code_size, '\0');
    program.code = code.data();
    SPANNING_CALL(PJRT_Executable_OptimizedProgram, args);
    return code;
  }

 private:
  PJRT_Executable* raw_;
};

std::shared_ptr<Program> describe(Client& client, PJRT_LoadedExecutable* raw) {
  auto program = std::make_shared<Program>();
  program->client = &client;
  const Unloaded unloaded(raw);
  program->num_outputs = unloaded.num_outputs();
  SPANNING_ARGS(args, PJRT_LoadedExecutable_AddressableDevices);
  args.executable = raw;
  SPANNING_CALL(PJRT_LoadedExecutable_AddressableDevices,
                args);  // for the CPU plugin these are all
  std::string in_order;
  std::set<int> ids, processes;
  for (size_t i = 0; i < args.num_addressable_devices; ++i) {
    PJRT_Device* raw_device = args.addressable_devices[i];
    const Device* device = state().device(raw_device);
    if (device == nullptr) fail(PJRT_Error_Code_INTERNAL, "a device of another client");
    program->devices.push_back(raw_device);
    program->process_of.push_back(device->process());
    if (device->is_addressable()) program->addressable_devices.push_back(raw_device);
    ids.insert(device->id);
    processes.insert(device->process());
    in_order += std::to_string(device->id) + ",";
  }
  // None at all has a program for one device of any kind.
  if (program->addressable_devices.empty() && !program->devices.empty()) {
    fail(PJRT_Error_Code_INVALID_ARGUMENT,
         "the program is for no device of process " + std::to_string(client.node));
  }
  program->processes.assign(processes.begin(), processes.end());
  for (const int id : ids) program->ids += (program->ids.empty() ? "" : ",") + std::to_string(id);
  if (program->spans_processes()) {
    program->fingerprint = fingerprint(unloaded.optimized_program(), in_order);
  }
  return program;
}

PJRT_Error* destroy_raw(PJRT_LoadedExecutable* raw) {
  SPANNING_ARGS(args, PJRT_LoadedExecutable_Destroy);
  args.executable = raw;
  return cpu()->PJRT_LoadedExecutable_Destroy(&args);
}

// Keeps what is to be known of an executable that the CPU plugin has made.
void adopt(Client& client, PJRT_LoadedExecutable* raw) {
  PJRT_Error* error = guarded([&] { state().add_program(raw, describe(client, raw)); });
  if (error == nullptr) return;
  if (PJRT_Error* another = destroy_raw(raw)) destroy(another);
  throw Failure{error};
}

std::string with_default_devices(PJRT_Client* client, std::string_view options) {
  return with_devices(options, [&](int replicas, int partitions) {
    std::vector<int> devices(static_cast<size_t>(replicas) * partitions);
    SPANNING_ARGS(args, PJRT_Client_DefaultDeviceAssignment);
    args.client = client;
    args.num_replicas = replicas;
    args.num_partitions = partitions;
    args.default_assignment_size = devices.size();
    args.default_assignment = devices.data();
    check(default_device_assignment(&args));
    return devices;
  });
}

PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  return guarded([&] {
    Client* client = state().client(args->client);
    if (client == nullptr) return check(cpu()->PJRT_Client_Compile(args));
    const std::string options =
        with_default_devices(args->client, {args->compile_options, args->compile_options_size});
    SPANNING_ARGS(own, PJRT_Client_Compile);
    own.client = args->client;
    own.program = args->program;
    own.compile_options = options.data();
    own.compile_options_size = options.size();
    SPANNING_CALL(PJRT_Client_Compile, own);
    adopt(*client, own.executable);
    args->executable = own.executable;
  });
}

PJRT_Error* deserialize_and_load(PJRT_Executable_DeserializeAndLoad_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_Executable_DeserializeAndLoad(args));
    if (Client* client = state().client(args->client)) adopt(*client, args->loaded_executable);
  });
}

PJRT_Error* destroy_loaded(PJRT_LoadedExecutable_Destroy_Args* args) {
  state().remove_program(args->executable);
  return cpu()->PJRT_LoadedExecutable_Destroy(args);
}

PJRT_Error* addressable_devices(PJRT_LoadedExecutable_AddressableDevices_Args* args) {
  return guarded([&] {
    check(cpu()->PJRT_LoadedExecutable_AddressableDevices(args));
    if (const auto program = state().program(args->executable)) {
      args->addressable_devices = program->addressable_devices.data();
      args->num_addressable_devices = program->addressable_devices.size();
    }
  });
}

}  // namespace

void wrap_programs(PJRT_Api& api) {
  api.PJRT_Client_Compile = &compile;
  api.PJRT_Executable_DeserializeAndLoad = &deserialize_and_load;
  api.PJRT_LoadedExecutable_Destroy = &destroy_loaded;
  api.PJRT_LoadedExecutable_AddressableDevices = &addressable_devices;
}

}  // namespace spanning
