#include "topology.h"

#include "call.h"
#include "executable.h"

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
  LAZYXLA_PJRT_ARGS(args, PJRT_TopologyDescription_Create);
  args.topology_name = name.data();
  args.topology_name_size = name.size();
  args.create_options = values.data();
  args.num_options = values.size();
  check(api, api->PJRT_TopologyDescription_Create(&args), "describing the devices " + name);
  raw_ = args.topology;

  LAZYXLA_PJRT_ARGS(platform, PJRT_TopologyDescription_PlatformName);
  platform.topology = raw_;
  LAZYXLA_PJRT_CALL(api, PJRT_TopologyDescription_PlatformName, platform);
  platform_name_.assign(platform.platform_name, platform.platform_name_size);

  LAZYXLA_PJRT_ARGS(version, PJRT_TopologyDescription_PlatformVersion);
  version.topology = raw_;
  LAZYXLA_PJRT_CALL(api, PJRT_TopologyDescription_PlatformVersion, version);
  platform_version_.assign(version.platform_version, version.platform_version_size);

  LAZYXLA_PJRT_ARGS(devices, PJRT_TopologyDescription_GetDeviceDescriptions);
  devices.topology = raw_;
  LAZYXLA_PJRT_CALL(api, PJRT_TopologyDescription_GetDeviceDescriptions, devices);
  devices_.reserve(devices.num_descriptions);
  for (size_t i = 0; i < devices.num_descriptions; ++i) {
    devices_.push_back(describe(api, devices.descriptions[i]));
  }
}

Topology::~Topology() {
  if (raw_ == nullptr || forked()) {
    return;
  }
  LAZYXLA_PJRT_ARGS(args, PJRT_TopologyDescription_Destroy);
  args.topology = raw_;
  ignore_error(&plugin_.api(), plugin_.api().PJRT_TopologyDescription_Destroy(&args));
}

std::unique_ptr<CompiledProgram> Topology::compile(std::string_view code, std::string_view format,
                                                   std::string_view options) const {
  check_not_forked();
  const PJRT_Program program = to_program(code, format);
  LAZYXLA_PJRT_ARGS(args, PJRT_Compile);
  args.topology = raw_;
  args.program = &program;
  args.compile_options = options.data();
  args.compile_options_size = options.size();
  LAZYXLA_PJRT_CALL(&plugin_.api(), PJRT_Compile, args);
  return std::make_unique<CompiledProgram>(plugin_.api(), args.executable);
}

}  // namespace lazyxla::pjrt
