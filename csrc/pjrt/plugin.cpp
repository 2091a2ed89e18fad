#include "pjrt/plugin.h"

#include <dlfcn.h>

#include <filesystem>
#include <memory>
#include <type_traits>

#include "common/locks.h"
#include "pjrt/call.h"

namespace lazyxla::pjrt {
namespace {

constexpr const char* kAdvice =
    "Install a package that brings a plugin (xla-cpu-pjrt for CPUs, jax-cuda13-pjrt for NVIDIA "
    "GPUs, libtpu for TPUs), or give the path of a library that exports GetPjrtApi.";

[[noreturn]] void fail(PJRT_Error_Code code, const std::string& path, const std::string& why) {
  throw Error(code, "PJRT plugin " + path + ": " + why);
}

// Opens the library and asks it for its function table.
const PJRT_Api* open(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) {
    fail(PJRT_Error_Code_NOT_FOUND, path, std::string("no such file. ") + kAdvice);
  }
  // RTLD_LOCAL: two plugins each carry their own copy of XLA, whose symbols must not mix.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    fail(PJRT_Error_Code_INVALID_ARGUMENT, path,
         std::string("cannot be loaded (") + (reason ? reason : "unknown reason") +
             "). It must be a shared library for this kind of machine with all the libraries it "
             "needs installed. " +
             kAdvice);
  }
  using GetPjrtApi = const PJRT_Api*();
  auto* get_api = reinterpret_cast<GetPjrtApi*>(dlsym(library, "GetPjrtApi"));
  if (get_api == nullptr) {
    dlclose(library);
    fail(PJRT_Error_Code_INVALID_ARGUMENT, path,
         std::string("is a shared library, but not a PJRT plugin: it exports no GetPjrtApi. ") +
             kAdvice);
  }
  const PJRT_Api* api = get_api();
  if (api == nullptr) {
    fail(PJRT_Error_Code_INTERNAL, path, "its GetPjrtApi returned nothing");
  }
  return api;
}

void check_version(const PJRT_Api& api, const std::string& path) {
  const auto version = [](int major, int minor) {
    return std::to_string(major) + "." + std::to_string(minor);
  };
  const PJRT_Api_Version& theirs = api.pjrt_api_version;
  const std::string both = "it speaks PJRT C API " +
                           version(theirs.major_version, theirs.minor_version) +
                           ", lazyxla was built for " + version(PJRT_API_MAJOR, PJRT_API_MINOR);
  if (theirs.major_version != PJRT_API_MAJOR) {
    fail(PJRT_Error_Code_FAILED_PRECONDITION, path,
         both + ", and the major versions must be the same. Install matching versions.");
  }
  // PJRT_Compile ends the part of the table that every plugin has; `has` checks for the rest.
  if (!has(api, &PJRT_Api::PJRT_Compile)) {
    fail(PJRT_Error_Code_FAILED_PRECONDITION, path,
         both + ": it is too old. Install a newer version of the plugin.");
  }
}

void initialize(const PJRT_Api* api) {
  LAZYXLA_PJRT_QUERY(args, api, PJRT_Plugin_Initialize, extension_start, nullptr);
}

// Attributes are optional: a plugin without them works, too.
NamedValues read_attributes(const PJRT_Api* api) {
  LAZYXLA_PJRT_ARGS(args, PJRT_Plugin_Attributes, extension_start, nullptr);
  if (ignore_error(api, api->PJRT_Plugin_Attributes(&args))) {
    return {};
  }
  return read_named_values(args.attributes, args.num_attributes);
}

template <typename T>
const T* find(const NamedValues& values, const char* name) {
  const auto it = values.find(name);
  return it == values.end() ? nullptr : std::get_if<T>(&it->second);
}

}  // namespace

NamedValues read_named_values(const PJRT_NamedValue* values, size_t count) {
  NamedValues result;
  for (size_t i = 0; i < count; ++i) {
    const PJRT_NamedValue& value = values[i];
    NamedValue& slot = result[std::string(value.name, value.name_size)];
    switch (value.type) {
      case PJRT_NamedValue_kString:
        slot = std::string(value.string_value, value.value_size);
        break;
      case PJRT_NamedValue_kInt64:
        slot = value.int64_value;
        break;
      case PJRT_NamedValue_kInt64List:
        slot = std::vector<int64_t>(value.int64_array_value,
                                    value.int64_array_value + value.value_size);
        break;
      case PJRT_NamedValue_kFloat:
        slot = value.float_value;
        break;
      case PJRT_NamedValue_kBool:
        slot = value.bool_value;
        break;
    }
  }
  return result;
}

std::vector<PJRT_NamedValue> to_named_values(const NamedValues& values) {
  std::vector<PJRT_NamedValue> result;
  result.reserve(values.size());
  for (const auto& [name, value] : values) {
    PJRT_NamedValue& out = result.emplace_back();
    out.struct_size = PJRT_NamedValue_STRUCT_SIZE;
    out.name = name.data();
    out.name_size = name.size();
    out.value_size = 1;
    std::visit(
        [&out](const auto& held) {
          using T = std::decay_t<decltype(held)>;
          if constexpr (std::is_same_v<T, bool>) {
            out.type = PJRT_NamedValue_kBool;
            out.bool_value = held;
          } else if constexpr (std::is_same_v<T, int64_t>) {
            out.type = PJRT_NamedValue_kInt64;
            out.int64_value = held;
          } else if constexpr (std::is_same_v<T, float>) {
            out.type = PJRT_NamedValue_kFloat;
            out.float_value = held;
          } else if constexpr (std::is_same_v<T, std::string>) {
            out.type = PJRT_NamedValue_kString;
            out.string_value = held.data();
            out.value_size = held.size();
          } else {
            out.type = PJRT_NamedValue_kInt64List;
            out.int64_array_value = held.data();
            out.value_size = held.size();
          }
        },
        value);
  }
  return result;
}

DeviceDescription describe(const PJRT_Api* api, PJRT_DeviceDescription* raw) {
  LAZYXLA_PJRT_QUERY(id, api, PJRT_DeviceDescription_Id, device_description, raw);

  LAZYXLA_PJRT_QUERY(process, api, PJRT_DeviceDescription_ProcessIndex, device_description, raw);

  LAZYXLA_PJRT_QUERY(kind, api, PJRT_DeviceDescription_Kind, device_description, raw);

  LAZYXLA_PJRT_QUERY(attributes, api, PJRT_DeviceDescription_Attributes, device_description, raw);

  return {.id = id.id,
          .process_index = process.process_index,
          .kind = std::string(kind.device_kind, kind.device_kind_size),
          .attributes = read_named_values(attributes.attributes, attributes.num_attributes)};
}

const Plugin& Plugin::load(const std::string& path) {
  static auto& mutex = *new OrderedMutex();
  // Leaked on purpose: plugins remain loaded while the process ends.
  static auto& loaded = *new std::map<std::string, std::unique_ptr<Plugin>>();

  std::error_code error;
  std::string key = std::filesystem::canonical(path, error).string();
  if (error) {
    key = path;  // open() says what is wrong with it
  }
  std::lock_guard lock(mutex);
  const auto it = loaded.find(key);
  if (it != loaded.end()) {
    return *it->second;
  }
  const PJRT_Api* api = open(path);
  check_version(*api, path);
  initialize(api);
  std::unique_ptr<Plugin> plugin(new Plugin(path, api));
  return *loaded.emplace(std::move(key), std::move(plugin)).first->second;
}

Plugin::Plugin(std::string path, const PJRT_Api* api)
    : path_(std::move(path)), api_(api), attributes_(read_attributes(api)) {}

std::pair<int, int> Plugin::api_version() const {
  return {api_->pjrt_api_version.major_version, api_->pjrt_api_version.minor_version};
}

std::optional<std::array<int64_t, 3>> Plugin::stablehlo_current_version() const {
  const auto* version = find<std::vector<int64_t>>(attributes_, "stablehlo_current_version");
  if (version == nullptr || version->size() != 3) {
    return std::nullopt;
  }
  return std::array<int64_t, 3>{(*version)[0], (*version)[1], (*version)[2]};
}

std::optional<int64_t> Plugin::xla_version() const {
  const auto* version = find<int64_t>(attributes_, "xla_version");
  return version == nullptr ? std::nullopt : std::optional(*version);
}

}  // namespace lazyxla::pjrt
