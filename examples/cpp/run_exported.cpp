// Runs a program that lazyxla.export(..., platforms=(one,)) saved, by a PJRT plugin, without
// Python.
//
//   g++ -std=c++17 -I<folder of pjrt_c_api.h> run_exported.cpp -o run_exported -ldl
//   run_exported plugin.so program.stablehlo out  f32:3,4:weight.bin  i64:2,9:tokens.bin ...
//
// The inputs are those that manifest.json lists, in its order: dtype, shape, and a file of the
// dense row-major elements. The results are written to out.0, out.1 and so on.
#include <dlfcn.h>
#include <pjrt_c_api.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace {

const PJRT_Api* api;

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

void check(PJRT_Error* error) {
  if (!error) return;
  PJRT_Error_Message_Args args{PJRT_Error_Message_Args_STRUCT_SIZE};
  args.error = error;
  api->PJRT_Error_Message(&args);
  fail(std::string(args.message, args.message_size));
}

// Calls a function of the plugin's: every one takes a struct that states its own size.
#define ARGS(name, function) \
  function##_Args name{};    \
  name.struct_size = function##_Args_STRUCT_SIZE
#define CALL(function, args) check(api->function(&(args)))

void await(PJRT_Event* event) {
  ARGS(args, PJRT_Event_Await);
  args.event = event;
  CALL(PJRT_Event_Await, args);
}

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

const std::map<std::string, PJRT_Buffer_Type> kTypes = {
    {"bool", PJRT_Buffer_Type_PRED}, {"i32", PJRT_Buffer_Type_S32},
    {"i64", PJRT_Buffer_Type_S64},   {"f32", PJRT_Buffer_Type_F32},
    {"bf16", PJRT_Buffer_Type_BF16}, {"f16", PJRT_Buffer_Type_F16}};

// "f32:3,4:weight.bin" as an array on the device.
PJRT_Buffer* upload(PJRT_Client* client, PJRT_Device* device, const std::string& described) {
  std::istringstream parts(described);
  std::string type, shape, path, size;
  std::getline(parts, type, ':');
  std::getline(parts, shape, ':');
  std::getline(parts, path);
  std::vector<int64_t> dims;
  std::istringstream sizes(shape);
  while (std::getline(sizes, size, ',')) dims.push_back(std::stoll(size));
  if (!kTypes.count(type)) fail("no such type: " + described);
  const std::string data = read(path);
  ARGS(args, PJRT_Client_BufferFromHostBuffer);
  args.client = client;
  args.data = data.data();
  args.type = kTypes.at(type);
  args.dims = dims.data();
  args.num_dims = dims.size();
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  args.device = device;
  CALL(PJRT_Client_BufferFromHostBuffer, args);
  await(args.done_with_host_buffer);
  return args.buffer;
}

void download(PJRT_Buffer* buffer, const std::string& path) {
  ARGS(args, PJRT_Buffer_ToHostBuffer);
  args.src = buffer;
  CALL(PJRT_Buffer_ToHostBuffer, args);  // asks for the size
  std::string data(args.dst_size, '\0');
  args.dst = data.data();
  CALL(PJRT_Buffer_ToHostBuffer, args);
  await(args.event);
  std::ofstream(path, std::ios::binary) << data;
}

}  // namespace

int main(int count, char** words) {
  if (count < 4) fail("run_exported plugin.so program.stablehlo out [type:shape:file ...]");
  void* plugin = dlopen(words[1], RTLD_NOW);
  if (!plugin) fail(dlerror());
  api = reinterpret_cast<const PJRT_Api* (*)()>(dlsym(plugin, "GetPjrtApi"))();
  ARGS(start, PJRT_Plugin_Initialize);
  CALL(PJRT_Plugin_Initialize, start);
  ARGS(created, PJRT_Client_Create);
  CALL(PJRT_Client_Create, created);
  ARGS(devices, PJRT_Client_AddressableDevices);
  devices.client = created.client;
  CALL(PJRT_Client_AddressableDevices, devices);

  std::string code = read(words[2]);
  PJRT_Program program{PJRT_Program_STRUCT_SIZE};
  program.code = code.data();
  program.code_size = code.size();
  program.format = "mlir";
  program.format_size = 4;
  // A CompileOptionsProto: one replica, one partition.
  const std::string options = {0x1a, 0x04, 0x20, 0x01, 0x28, 0x01};
  ARGS(compiled, PJRT_Client_Compile);
  compiled.client = created.client;
  compiled.program = &program;
  compiled.compile_options = options.data();
  compiled.compile_options_size = options.size();
  CALL(PJRT_Client_Compile, compiled);
  ARGS(executable, PJRT_LoadedExecutable_GetExecutable);
  executable.loaded_executable = compiled.executable;
  CALL(PJRT_LoadedExecutable_GetExecutable, executable);
  ARGS(outputs, PJRT_Executable_NumOutputs);
  outputs.executable = executable.executable;
  CALL(PJRT_Executable_NumOutputs, outputs);

  std::vector<PJRT_Buffer*> inputs, results(outputs.num_outputs);
  for (int i = 4; i < count; ++i) {
    inputs.push_back(upload(created.client, devices.addressable_devices[0], words[i]));
  }
  PJRT_ExecuteOptions run{PJRT_ExecuteOptions_STRUCT_SIZE};
  PJRT_Buffer* const* given = inputs.data();
  PJRT_Buffer** taken = results.data();
  ARGS(execution, PJRT_LoadedExecutable_Execute);
  execution.executable = compiled.executable;
  execution.options = &run;
  execution.argument_lists = &given;
  execution.num_devices = 1;
  execution.num_args = inputs.size();
  execution.output_lists = &taken;
  CALL(PJRT_LoadedExecutable_Execute, execution);
  for (size_t i = 0; i < results.size(); ++i) {
    download(results[i], std::string(words[3]) + "." + std::to_string(i));
  }
}
