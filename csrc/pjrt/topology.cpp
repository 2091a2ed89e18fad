#include "pjrt/topology.h"

#include "pjrt/call.h"
#include "pjrt/client.h"
#include "pjrt/executable.h"

namespace lazyxla::pjrt {
std::unique_ptr<Topology> Topology::create(const Plugin& plugin, const std::string& name,
                                           const NamedValues& options) {
  check_not_forked();
  std::unique_ptr<Topology> topology(new Topology(plugin));
  topology->start(name, options);
  return topology;
}

void Topology::start(const std::string& name, const NamedValues& options) {
  const PJRT_Api* api = &plugin_.api();
  const std::vector<PJRT_NamedValue> values = to_named_values(options);
  LAZYXLA_PJRT_ARGS(args, PJRT_TopologyDescription_Create, topology_name, name.data());
  args.topology_name_size = name.size();
  args.create_options = values.data();
  args.num_options = values.size();
  check(api, api->PJRT_TopologyDescription_Create(&args), "describing the devices " + name);
  raw_ = args.topology;
  describe_platform();

  LAZYXLA_PJRT_QUERY(devices, api, PJRT_TopologyDescription_GetDeviceDescriptions, topology, raw_);
  devices_.reserve(devices.num_descriptions);
  for (size_t i = 0; i < devices.num_descriptions; ++i) {
    devices_.push_back(describe(api, devices.descriptions[i]));
  }
}

std::unique_ptr<Topology> Topology::of(const Client& client) {
  check_not_forked();
  std::unique_ptr<Topology> topology(new Topology(client.plugin()));
  topology->client_ = &client;
  const PJRT_Api* api = &client.api();
  if (has(*api, &PJRT_Api::PJRT_Client_TopologyDescription)) {
    LAZYXLA_PJRT_ARGS(args, PJRT_Client_TopologyDescription, client, client.raw());
    if (!ignore_error(api, api->PJRT_Client_TopologyDescription(&args))) {
      topology->raw_ = args.topology;
    }
  }
  try {
    if (topology->raw_ != nullptr) topology->describe_platform();
  } catch (const Error&) {
    // The client fills in what the topology lacks.
  }
  if (topology->platform_name_.empty()) topology->platform_name_ = client.platform_name();
  if (topology->platform_version_.empty()) topology->platform_version_ = client.platform_version();
  for (const Device& device : client.devices()) {
    topology->devices_.push_back(device.description());
  }
  return topology;
}

void Topology::describe_platform() {
  const PJRT_Api* api = &plugin_.api();
  LAZYXLA_PJRT_QUERY(platform, api, PJRT_TopologyDescription_PlatformName, topology, raw_);
  platform_name_.assign(platform.platform_name, platform.platform_name_size);

  LAZYXLA_PJRT_QUERY(version, api, PJRT_TopologyDescription_PlatformVersion, topology, raw_);
  platform_version_.assign(version.platform_version, version.platform_version_size);
}

Topology::~Topology() {
  if (raw_ == nullptr || client_ != nullptr || forked()) {
    return;
  }
  LAZYXLA_PJRT_ARGS(args, PJRT_TopologyDescription_Destroy, topology, raw_);
  ignore_error(&plugin_.api(), plugin_.api().PJRT_TopologyDescription_Destroy(&args));
}

std::shared_ptr<const CompiledProgram> Topology::compile(std::string_view code,
                                                         std::string_view format,
                                                         const CompileOptions& options) const {
  if (client_ != nullptr) {
    std::shared_ptr<Executable> loaded = client_->compile(code, format, options);
    const CompiledProgram* program = &loaded->program();
    return {std::move(loaded), program};
  }
  check_not_forked();
  const PJRT_Program program = to_program(code, format);
  std::vector<int64_t> ids;
  for (const DeviceDescription& device : devices_) ids.push_back(device.id);
  const std::string serialized = serialize(with_device_ids(options, ids));
  LAZYXLA_PJRT_ARGS(args, PJRT_Compile, topology, raw_);
  args.program = &program;
  args.compile_options = serialized.data();
  args.compile_options_size = serialized.size();
  LAZYXLA_PJRT_CALL(&plugin_.api(), PJRT_Compile, args);
  return std::make_shared<CompiledProgram>(plugin_.api(), args.executable);
}

void Topology::check_options(const CompileOptions& options) const {
  if (client_ != nullptr) return client_->check_options(options);
  compile(kSmallestProgram, "mlir", options);
}

int Topology::processes() const {
  return client_ && client_->spans_processes() ? client_->processes().count : 1;
}

const CompileOptions& Topology::compile_options() const {
  static const auto& none = *new CompileOptions();
  return client_ ? client_->compile_options() : none;
}

}  // namespace lazyxla::pjrt
