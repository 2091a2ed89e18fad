#include "pjrt/client.h"

#include <sstream>

#include "pjrt/call.h"
#include "pjrt/disposal.h"

namespace lazyxla::pjrt {
namespace {

std::atomic<int> compiling_now{0};

// Arguments without the host buffer's semantics.
PJRT_Client_BufferFromHostBuffer_Args host_buffer(PJRT_Client* client, const void* data,
                                                  PJRT_Buffer_Type type,
                                                  std::span<const int64_t> dims,
                                                  const Device& device) {
  check_not_forked();
  LAZYXLA_PJRT_ARGS(args, PJRT_Client_BufferFromHostBuffer, client, client);
  args.data = data;
  args.type = type;
  args.dims = dims.data();
  args.num_dims = dims.size();
  args.device = device.raw();
  return args;
}

}  // namespace

Device::Device(const PJRT_Api& api, PJRT_Device* raw, int index, bool retires_donated)
    : api_(&api),
      raw_(raw),
      index_(index),
      usage_(std::make_unique<Usage>()),
      retires_donated_(retires_donated),
      in_flight_(std::make_unique<InFlight>(api)) {
  LAZYXLA_PJRT_QUERY(description, api_, PJRT_Device_GetDescription, device, raw);

  description_ = describe(api_, description.device_description);

  LAZYXLA_PJRT_QUERY(debug, api_, PJRT_DeviceDescription_DebugString, device_description,
                     description.device_description);
  debug_string_.assign(debug.debug_string, debug.debug_string_size);
}

void Device::Usage::Tally::add(int64_t amount) {
  allocated.fetch_add(amount, std::memory_order_relaxed);
  const int64_t now = current.fetch_add(amount, std::memory_order_relaxed) + amount;
  int64_t highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
}

void Device::Usage::Tally::remove(int64_t amount) {
  current.fetch_sub(amount, std::memory_order_relaxed);
}

MemoryStats::Tally Device::Usage::Tally::read() const {
  const int64_t now = current.load(), all = allocated.load();
  return {.current = now,
          .peak = peak.load(),
          .allocated = all - allocated_before,
          .freed = all - now - freed_before};
}

void Device::Usage::Tally::reset_accumulated() {
  allocated_before = allocated.load();
  freed_before = allocated - current;
}

void Device::Usage::add(int64_t size, int64_t count) {
  buffers.add(count);
  bytes.add(size);
}

void Device::Usage::remove(int64_t size, int64_t count) {
  buffers.remove(count);
  bytes.remove(size);
}

MemoryStats Device::memory_stats() const {
  return {.buffers = usage_->buffers.read(), .bytes = usage_->bytes.read()};
}

void Device::reset_peak() const {
  usage_->buffers.peak = usage_->buffers.current.load();
  usage_->bytes.peak = usage_->bytes.current.load();
}

void Device::reset_accumulated() const {
  usage_->buffers.reset_accumulated();
  usage_->bytes.reset_accumulated();
}

bool Device::is_idle() const { return in_flight_->is_over(); }

void Device::await() const {
  check_not_forked();
  in_flight_->await();
}

void Device::note_upload(const Buffer& buffer) const {
  PJRT_Event* ready = ready_event(api_, buffer.raw());
  if (is_ready(api_, ready)) {  // a failure shows on the buffer
    destroy_event(api_, ready);
  } else {
    in_flight_->add(ready, {});
  }
}

std::optional<PJRT_Device_MemoryStats_Args> Device::allocator_stats() const {
  check_not_forked();
  LAZYXLA_PJRT_ARGS(args, PJRT_Device_MemoryStats, device, raw_);
  if (ignore_error(api_, api_->PJRT_Device_MemoryStats(&args))) return std::nullopt;
  return args;
}

std::unique_ptr<Client> Client::create(const Plugin& plugin, const NamedValues& options,
                                       const std::map<std::string, CompileOptions>& compile_options,
                                       const Processes& processes) {
  check_not_forked();
  // The Client exists before its PJRT client does: a fork during the start counts as one after it,
  // and what fails below is cleaned up.
  std::unique_ptr<Client> client(new Client(plugin, processes));
  client->start(options);
  if (auto own = compile_options.find(client->platform_name()); own != compile_options.end()) {
    client->keep_known(own->second);
  }
  return client;
}

void Client::start(const NamedValues& options) {
  const PJRT_Api* api = &plugin_.api();
  const std::vector<PJRT_NamedValue> values = to_named_values(options);
  LAZYXLA_PJRT_ARGS(args, PJRT_Client_Create, create_options, values.data());
  args.num_options = values.size();
  if (processes_.store) add_store(args, *processes_.store);
  check(api, api->PJRT_Client_Create(&args), "starting the devices of " + plugin_.path());
  raw_ = args.client;

  LAZYXLA_PJRT_QUERY(name, api, PJRT_Client_PlatformName, client, raw_);
  platform_name_.assign(name.platform_name, name.platform_name_size);

  LAZYXLA_PJRT_QUERY(version, api, PJRT_Client_PlatformVersion, client, raw_);
  platform_version_.assign(version.platform_version, version.platform_version_size);

  find_devices();
  if (processes_.store) find_others_devices();
}

void Client::find_devices() {
  const PJRT_Api* api = &plugin_.api();
  LAZYXLA_PJRT_QUERY(devices, api, PJRT_Client_AddressableDevices, client, raw_);
  devices_.reserve(devices.num_addressable_devices);
  const bool retires_donated = platform_name_ == "cpu";
  for (size_t i = 0; i < devices.num_addressable_devices; ++i) {
    devices_.emplace_back(*api, devices.addressable_devices[i], static_cast<int>(i),
                          retires_donated);
    all_devices_.push_back(devices_.back().description().id);
    process_of_.push_back(processes_.index);
  }
}

// The plugin has an order of its own for all devices, and its own numbers for the processes: so
// each process reports to the others which devices are its own.
void Client::find_others_devices() {
  LAZYXLA_PJRT_QUERY(every, &api(), PJRT_Client_Devices, client, raw_);
  if (every.num_devices == devices_.size()) return;
  const auto key = [](int process) { return "lazyxla/devices/" + std::to_string(process); };
  std::string own;
  for (const int64_t id : all_devices_) own += std::to_string(id) + " ";
  processes_.store->put(key(processes_.index), own);
  all_devices_.clear();
  process_of_.clear();
  for (int process = 0; process < processes_.count; ++process) {
    if (process == processes_.index) first_device_ = static_cast<int>(all_devices_.size());
    std::istringstream ids(processes_.store->get(key(process), processes_.timeout));
    for (int64_t id; ids >> id;) {
      all_devices_.push_back(id);
      process_of_.push_back(process);
    }
  }
}

void Client::keep_known(const CompileOptions& options) {
  const auto known = [this](const CompileOptions& some) {
    try {
      check_options(some);
      return true;
    } catch (const Error& error) {
      // Any other error is not about the options, and without them values may be wrong.
      if (error.code() != PJRT_Error_Code_INVALID_ARGUMENT) throw;
      return false;
    }
  };
  if (known(options)) {
    compile_options_ = options;
    return;
  }
  for (const auto& option : options) {
    if (known({option})) compile_options_.insert(option);
  }
}

Client::~Client() {
  if (raw_ == nullptr || forked()) {
    return;
  }
  devices_.clear();  // frees the handles in flight, which belong to the client
  finish_disposal();
  LAZYXLA_PJRT_ARGS(args, PJRT_Client_Destroy, client, raw_);
  ignore_error(&api(), api().PJRT_Client_Destroy(&args));
}

int compiling() { return compiling_now; }

std::unique_ptr<Executable> Client::compile(std::string_view code, std::string_view format,
                                            const CompileOptions& options) const {
  struct Count {
    Count() { ++compiling_now; }
    ~Count() { --compiling_now; }
  } count;
  try {
    return compile_unchecked(code, format, options);
  } catch (const Error& error) {
    if (error.code() != PJRT_Error_Code_INVALID_ARGUMENT || options.empty()) throw;
    blame_options(options);
    throw;
  }
}

void Client::blame_options(const CompileOptions& options) const {
  try {
    check_options(options);
  } catch (const Error& error) {
    // All other options are checked where they are set.
    throw Error(error.code(), std::string("the options of LAZYXLA_XLA_OPTIONS (setting ") +
                                  "xla_options): " + error.what());
  }
}

std::unique_ptr<Executable> Client::compile_unchecked(std::string_view code,
                                                      std::string_view format,
                                                      const CompileOptions& options) const {
  check_not_forked();
  const PJRT_Program program = to_program(code, format);
  CompileOptions all = options;
  all.insert(compile_options_.begin(), compile_options_.end());
  const std::string serialized = serialize(with_device_ids(std::move(all), all_devices_));
  LAZYXLA_PJRT_ARGS(args, PJRT_Client_Compile, client, raw_);
  args.program = &program;
  args.compile_options = serialized.data();
  args.compile_options_size = serialized.size();
  LAZYXLA_PJRT_CALL(&api(), PJRT_Client_Compile, args);
  return Executable::adopt(api(), args.executable);
}

void Client::check_options(const CompileOptions& options) const {
  compile_unchecked(kSmallestProgram, "mlir", options);
}

std::unique_ptr<Executable> Client::deserialize(std::string_view serialized) const {
  check_not_forked();
  LAZYXLA_PJRT_ARGS(args, PJRT_Executable_DeserializeAndLoad, client, raw_);
  args.serialized_executable = serialized.data();
  args.serialized_executable_size = serialized.size();
  LAZYXLA_PJRT_CALL(&api(), PJRT_Executable_DeserializeAndLoad, args);
  return Executable::adopt(api(), args.loaded_executable);
}

Buffer Client::buffer_from_host(const void* data, PJRT_Buffer_Type type,
                                std::span<const int64_t> dims,
                                std::span<const int64_t> byte_strides, const Device& device) const {
  auto args = host_buffer(raw_, data, type, dims, device);
  args.byte_strides = byte_strides.data();
  args.num_byte_strides = byte_strides.size();
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  LAZYXLA_PJRT_CALL(&api(), PJRT_Client_BufferFromHostBuffer, args);
  // With these semantics the plugin no longer reads `data`; a failed transfer shows on the buffer
  // itself.
  destroy_event(&api(), args.done_with_host_buffer);
  Buffer buffer = Buffer::adopt(device, args.buffer);
  device.note_upload(buffer);
  return buffer;
}

bool Client::map_host_memory(void* data, size_t nbytes) const {
  if (forked() || !has(api(), &PJRT_Api::PJRT_Client_DmaMap)) return false;
  LAZYXLA_PJRT_ARGS(args, PJRT_Client_DmaMap, client, raw_);
  args.data = data;
  args.size = nbytes;
  return !ignore_error(&api(), api().PJRT_Client_DmaMap(&args));
}

void Client::unmap_host_memory(void* data) const {
  if (forked()) return;
  LAZYXLA_PJRT_ARGS(args, PJRT_Client_DmaUnmap, client, raw_);
  args.data = data;
  ignore_error(&api(), api().PJRT_Client_DmaUnmap(&args));
}

Buffer Client::buffer_from_lasting_memory(PJRT_HostBufferSemantics semantics, const void* data,
                                          PJRT_Buffer_Type type, std::span<const int64_t> dims,
                                          const Device& device, std::function<void()> done) const {
  auto args = host_buffer(raw_, data, type, dims, device);
  args.host_buffer_semantics = semantics;
  LAZYXLA_PJRT_CALL(&api(), PJRT_Client_BufferFromHostBuffer, args);
  Buffer buffer = Buffer::adopt(device, args.buffer);
  device.note_upload(buffer);
  if (args.done_with_host_buffer == nullptr) {
    done();
    return buffer;
  }
  struct Done {
    const PJRT_Api* api;
    std::function<void()> call;
  };
  LAZYXLA_PJRT_ARGS(ready, PJRT_Event_OnReady, event, args.done_with_host_buffer);
  ready.user_arg = new Done{&api(), std::move(done)};
  ready.callback = [](PJRT_Error* error, void* user_arg) {
    std::unique_ptr<Done> done(static_cast<Done*>(user_arg));
    ignore_error(done->api, error);  // it shows on the buffer itself
    done->call();
  };
  PJRT_Error* error = api().PJRT_Event_OnReady(&ready);
  destroy_event(&api(), args.done_with_host_buffer);
  check(&api(), error, "PJRT_Event_OnReady");
  return buffer;
}

}  // namespace lazyxla::pjrt
