// An executable: a compiled program, loaded and ready to run.
//
// An executable is portable: it belongs to no device, and one Executable serves all devices of the
// client. The exception is an executable for several devices at once, which serves only these; for
// devices of other processes, their processes call it. `execute` is
// the hot path of the whole project: it queries nothing, formats nothing, and its scratch vectors
// keep their memory per thread.
//
// Donation. A module says with `tf.aliasing_output` on a parameter which output may take over that
// parameter's memory; whether it does is decided at each call by `donated_args`. Arguments that are
// not listed are kept intact, aliased in the module or not (the runtime then copies first).
//
//   auto executable = client->compile(module, "mlir", {});
//   Buffer* args[] = {weight.get(), gradient.get()};
//   int donated[] = {0};
//   auto outputs = executable->execute(args, donated, device);   // weight is consumed now
#pragma once

#include <pjrt_c_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "pjrt/compiled_program.h"
#include "pjrt/in_flight.h"

namespace lazyxla::pjrt {

class Buffer;
class Device;

class Executable {
 public:
  // Takes ownership of `raw`. Programs are made by Client::compile and Client::deserialize.
  static std::unique_ptr<Executable> adopt(const PJRT_Api& api, PJRT_LoadedExecutable* raw);

  ~Executable();
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;

  // Enqueues one run on `device`, where all `args` are, and returns its outputs without waiting for
  // them. `donated_args` are positions in `args`, in ascending order, that the module aliases to an
  // output; when this returns, those Buffers are consumed. A Buffer that is donated may appear only
  // once in `args`. The plugin checks number and byte sizes of the arguments, not always their
  // types. If it throws, there are no outputs, and arguments the plugin has not taken remain valid.
  // `over`, if any, is called once the run is over (in_flight.h).
  std::vector<Buffer> execute(std::span<Buffer* const> args, std::span<const int> donated_args,
                              const Device& device, InFlight::Listener over = {}) const;

  // The same for a program that is partitioned over devices (kDevices), of which `devices` are this
  // process's. `args` are those of the first position, one for each device, then those of the
  // second, and so on; of each output there is one on each device, too. `over` is called once the
  // run is over on all of them.
  std::vector<std::vector<Buffer>> execute_on_each(std::span<Buffer* const> args,
                                                   std::span<const int> donated_args,
                                                   std::span<const Device* const> devices,
                                                   InFlight::Listener over = {}) const;

  // What the compiler knows about it.
  const CompiledProgram& program() const { return *program_; }

 private:
  Executable(const PJRT_Api& api, PJRT_LoadedExecutable* raw) : api_(&api), raw_(raw) {}
  // The bytes of each output on a device, learnt from the first run: only the plugin knows its
  // padding. If that throws, the outputs are freed.
  const std::vector<size_t>& output_nbytes(std::span<PJRT_Buffer* const> outputs) const;
  // For each of `devices`, its position in the plugin's order.
  std::vector<size_t> rows_of(std::span<const Device* const> devices) const;
  PJRT_Error* call_plugin(PJRT_LoadedExecutable_Execute_Args& call) const;

  const PJRT_Api* api_;
  PJRT_LoadedExecutable* raw_;
  std::optional<CompiledProgram> program_;  // set by adopt
  std::vector<PJRT_Device*> devices_;       // that it was compiled for; portable if not one
  size_t num_outputs_ = 0;
  mutable std::atomic<const std::vector<size_t>*> output_nbytes_{nullptr};  // null until known
};

// Measures the plugin's part of executions: the seconds that all threads have spent in the C API's
// execute function while this was on.
void measure_executions(bool on);
double seconds_in_executions();

// Our own options, of programs for several devices, "0,3,5": their positions among all of the
// client's. Either the program is partitioned over them, or each of them runs a replica of it.
inline constexpr char kDevices[] = "lazyxla_devices";
inline constexpr char kReplicas[] = "lazyxla_replicas";

// A serialized CompileOptionsProto for a program on one device, any device (portable), or on those
// of kDevices or kReplicas. The compiler refuses options that it does not know, and values of a
// wrong type.
std::string serialize(const CompileOptions& options);

// The options with devices given by their ids instead of their positions; `ids` are those of all
// devices. Throws Error if there is no such device.
CompileOptions with_device_ids(CompileOptions options, std::span<const int64_t> ids);

}  // namespace lazyxla::pjrt
