#include "pjrt/executable.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>

#include "common/fork.h"
#include "pjrt/buffer.h"
#include "pjrt/call.h"
#include "pjrt/client.h"
#include "pjrt/error.h"
#include "pjrt/in_flight.h"

namespace lazyxla::pjrt {
namespace {

// The arrays one call of the C API needs. Each thread keeps a set; a call takes it and puts it
// back, so a nested call (a host kernel that runs a program itself) gets its own.
struct Scratch {
  std::vector<PJRT_Buffer*> args;
  std::vector<int64_t> kept_args;
  std::vector<PJRT_Buffer*> donated;
  std::vector<PJRT_Buffer*> outputs;
};
thread_local Scratch thread_scratch;

std::atomic<bool> measuring{false};
std::atomic<int64_t> measured_ns{0};

// A message in the protocol buffer wire format: fields of a key, (number << 3) | wire type, and a
// value. Field numbers: XLA's compile_options.proto.
struct WireMessage {
  std::string data;

  void varint(int field, uint64_t value) {  // wire type 0
    number(static_cast<uint64_t>(field) << 3);
    number(value);
  }
  void bytes(int field, std::string_view value) {  // wire type 2
    number(static_cast<uint64_t>(field) << 3 | 2);
    number(value.size());
    data += value;
  }

 private:
  void number(uint64_t value) {  // seven bits a byte, the lowest first
    for (; value >= 0x80; value >>= 7) data += static_cast<char>(value | 0x80);
    data += static_cast<char>(value);
  }
};

// An OptionOverrideProto. A floating-point number is passed as text, which the compiler reads by
// the option's own type; by its source (pjrt_executable.cc) it takes a double only for an option of
// type float, and only if it is positive.
std::string option_override(const CompileOptions::mapped_type& value) {
  WireMessage message;
  if (const auto* text = std::get_if<std::string>(&value)) {
    message.bytes(1, *text);
  } else if (const auto* flag = std::get_if<bool>(&value)) {
    message.varint(2, *flag);
  } else if (const auto* number = std::get_if<int64_t>(&value)) {
    message.varint(3, static_cast<uint64_t>(*number));
  } else {
    char text_of[32];
    std::snprintf(text_of, sizeof(text_of), "%.17g", std::get<double>(value));
    message.bytes(1, text_of);
  }
  return message.data;
}

}  // namespace

PJRT_Buffer* handle_of(const Buffer& argument, size_t position) {
  PJRT_Buffer* raw = argument.raw();
  if (raw == nullptr) [[unlikely]] {
    throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                "argument " + std::to_string(position) +
                    " is a buffer whose memory an earlier execution has taken (it was donated)");
  }
  return raw;
}

std::unique_ptr<Executable> Executable::adopt(const PJRT_Api& api, PJRT_LoadedExecutable* raw) {
  std::unique_ptr<Executable> executable(new Executable(api, raw));

  LAZYXLA_PJRT_QUERY(unloaded, &api, PJRT_LoadedExecutable_GetExecutable, loaded_executable, raw);
  executable->program_.emplace(api, unloaded.executable);
  executable->num_outputs_ = executable->program_->num_outputs();

  LAZYXLA_PJRT_QUERY(devices, &api, PJRT_LoadedExecutable_AddressableDevices, executable, raw);
  executable->devices_.assign(devices.addressable_devices,
                              devices.addressable_devices + devices.num_addressable_devices);
  return executable;
}

Executable::~Executable() {
  delete output_nbytes_.load();
  if (forked()) {
    return;
  }
  program_.reset();
  LAZYXLA_PJRT_ARGS(loaded, PJRT_LoadedExecutable_Destroy, executable, raw_);
  ignore_error(api_, api_->PJRT_LoadedExecutable_Destroy(&loaded));
}

std::vector<Buffer> Executable::execute(std::span<Buffer* const> args,
                                        std::span<const int> donated_args, const Device& device,
                                        InFlight::Listener over) const {
  check_not_forked();
  const bool is_portable = devices_.size() != 1;
  if (!is_portable && devices_[0] != device.raw()) [[unlikely]] {
    throw Error(
        PJRT_Error_Code_INVALID_ARGUMENT,
        "the program was compiled for one device only, which is not " + device.debug_string());
  }

  Scratch scratch = std::exchange(thread_scratch, {});
  scratch.args.clear();
  scratch.kept_args.clear();
  scratch.donated.clear();
  scratch.outputs.assign(num_outputs_, nullptr);
  auto next_donated = donated_args.begin();
  for (size_t i = 0; i < args.size(); ++i) {
    scratch.args.push_back(handle_of(*args[i], i));
    if (next_donated != donated_args.end() && static_cast<size_t>(*next_donated) == i) {
      ++next_donated;
    } else {
      scratch.kept_args.push_back(static_cast<int64_t>(i));
    }
  }

  PJRT_ExecuteOptions options{};
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  options.non_donatable_input_indices = scratch.kept_args.data();
  options.num_non_donatable_input_indices = scratch.kept_args.size();
  PJRT_Buffer* const* arg_list = scratch.args.data();
  PJRT_Buffer** output_list = scratch.outputs.data();
  PJRT_Event* done = nullptr;
  LAZYXLA_PJRT_ARGS(call, PJRT_LoadedExecutable_Execute, executable, raw_);
  call.options = &options;
  call.argument_lists = &arg_list;
  call.num_devices = 1;
  call.num_args = args.size();
  call.output_lists = &output_list;
  call.device_complete_events = &done;
  call.execute_device = is_portable ? device.raw() : nullptr;
  PJRT_Error* error = call_plugin(call);

  // Before the outputs are counted: what is donated must not count twice.
  for (const int position : donated_args) {
    if (error == nullptr || is_taken(api_, scratch.args[position])) {
      if (PJRT_Buffer* handle = args[position]->consume()) {
        scratch.donated.push_back(handle);
      }
    }
  }
  if (done == nullptr || !device.retires_donated_) {
    for (PJRT_Buffer* handle : scratch.donated) {
      destroy_buffer(api_, handle);
    }
    scratch.donated.clear();
  }
  std::vector<Buffer> outputs;
  std::exception_ptr failure;
  if (error == nullptr) {
    try {
      const std::vector<size_t>& nbytes = output_nbytes(scratch.outputs);
      outputs.reserve(num_outputs_);
      for (size_t i = 0; i < num_outputs_; ++i) {
        outputs.emplace_back(device, scratch.outputs[i], nbytes[i]);
      }
    } catch (...) {  // it runs nevertheless
      failure = std::current_exception();
    }
  }
  if (error != nullptr || failure) over = nullptr;
  if (done != nullptr) {
    device.in_flight_->add(done, scratch.donated, std::move(over));
  }
  thread_scratch = std::move(scratch);
  check(api_, error, "PJRT_LoadedExecutable_Execute");
  if (failure) std::rethrow_exception(failure);
  return outputs;
}

const std::vector<size_t>& Executable::output_nbytes(std::span<PJRT_Buffer* const> outputs) const {
  if (const auto* known = output_nbytes_.load(std::memory_order_acquire)) return *known;
  auto nbytes = std::make_unique<std::vector<size_t>>();
  try {
    for (PJRT_Buffer* output : outputs) nbytes->push_back(on_device_nbytes(api_, output));
  } catch (...) {
    for (PJRT_Buffer* output : outputs) destroy_buffer(api_, output);
    throw;
  }
  const std::vector<size_t>* none = nullptr;
  if (output_nbytes_.compare_exchange_strong(none, nbytes.get())) return *nbytes.release();
  return *none;  // another thread was faster
}

PJRT_Error* Executable::call_plugin(PJRT_LoadedExecutable_Execute_Args& call) const {
  if (!measuring.load(std::memory_order_relaxed)) return api_->PJRT_LoadedExecutable_Execute(&call);
  using std::chrono::steady_clock;
  const steady_clock::time_point begin = steady_clock::now();
  PJRT_Error* error = api_->PJRT_LoadedExecutable_Execute(&call);
  measured_ns += std::chrono::nanoseconds(steady_clock::now() - begin).count();
  return error;
}

void measure_executions(bool on) { measuring = on; }
double seconds_in_executions() { return static_cast<double>(measured_ns.load()) * 1e-9; }

namespace {

// The devices of kDevices or kReplicas.
std::vector<int64_t> devices_of(const CompileOptions& options, const char* option) {
  std::vector<int64_t> devices;
  const auto found = options.find(option);
  if (found == options.end()) return devices;
  const std::string& text = std::get<std::string>(found->second);
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    devices.push_back(std::stoll(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  return devices;
}

// A DeviceAssignmentProto: by computation, which is a partition, the device of each replica.
std::string device_assignment(const std::vector<int64_t>& partitions,
                              const std::vector<int64_t>& replicas) {
  WireMessage assignment;
  assignment.varint(1, std::max<size_t>(replicas.size(), 1));    // replica_count
  assignment.varint(2, std::max<size_t>(partitions.size(), 1));  // computation_count
  const auto add = [&assignment](const std::vector<int64_t>& devices) {
    WireMessage computation;
    for (const int64_t device : devices) {
      computation.varint(1, static_cast<uint64_t>(device));  // replica_device_ids
    }
    assignment.bytes(3, computation.data);
  };
  for (const int64_t device : partitions) add({device});
  if (!replicas.empty()) add(replicas);
  return assignment.data;
}

}  // namespace

CompileOptions with_device_ids(CompileOptions options, std::span<const int64_t> ids) {
  for (const char* option : {kDevices, kReplicas}) {
    std::string text;
    for (const int64_t position : devices_of(options, option)) {
      if (position < 0 || static_cast<size_t>(position) >= ids.size()) {
        throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                    "the program is for a mesh with device " + std::to_string(position) +
                        ", and there are " + std::to_string(ids.size()) + " devices");
      }
      text += (text.empty() ? "" : ",") + std::to_string(ids[position]);
    }
    if (!text.empty()) options[option] = text;
  }
  return options;
}

std::string serialize(const CompileOptions& all) {
  const std::vector<int64_t> partitions = devices_of(all, kDevices);
  const std::vector<int64_t> replicas = devices_of(all, kReplicas);
  const bool is_portable = partitions.empty() && replicas.empty();
  WireMessage build;              // ExecutableBuildOptionsProto
  build.varint(1, uint64_t(-1));  // device_ordinal: "none"; left out it would mean device 0
  build.varint(4, std::max<size_t>(replicas.size(), 1));    // num_replicas
  build.varint(5, std::max<size_t>(partitions.size(), 1));  // num_partitions
  if (!partitions.empty()) build.varint(6, 1);              // use_spmd_partitioning
  if (!is_portable) build.bytes(9, device_assignment(partitions, replicas));
  if (!partitions.empty()) build.varint(19, 1);  // use_shardy_partitioner

  WireMessage options;                    // CompileOptionsProto
  options.bytes(3, build.data);           // executable_build_options
  if (is_portable) options.varint(4, 1);  // compile_portable_executable
  for (const auto& [name, value] : all) {
    if (name == kDevices || name == kReplicas) continue;
    WireMessage entry;  // of env_option_overrides, a map
    entry.bytes(1, name);
    entry.bytes(2, option_override(value));
    options.bytes(7, entry.data);
  }
  return options.data;
}

}  // namespace lazyxla::pjrt
