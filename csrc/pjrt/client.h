// The client: a plugin's running instance, which owns its devices and makes executables and
// buffers.
//
// A Client outlives every Buffer and Executable it made, and its Devices never move: they are held
// by reference. The process has one client, kept by Runtime; tests make their own. All functions
// may be called from several threads at once.
#pragma once

#include <pjrt_c_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/fork.h"
#include "pjrt/buffer.h"
#include "pjrt/executable.h"
#include "pjrt/in_flight.h"
#include "pjrt/plugin.h"
#include "pjrt/processes.h"

namespace lazyxla::pjrt {

// What our own Buffers occupy on a device. Kept by us because not every plugin has allocator
// statistics (the CPU one has none). Temporary memory of executions is not included.
struct MemoryStats {
  struct Tally {
    int64_t current = 0;
    int64_t peak = 0;       // the most since the start or the last reset_peak
    int64_t allocated = 0;  // total since the start or the last reset_accumulated
    int64_t freed = 0;
  };
  Tally buffers, bytes;
};

class Device {
 public:
  // `retires_donated`: whether freeing a donated buffer's handle waits, see in_flight.h.
  Device(const PJRT_Api& api, PJRT_Device* raw, int index, bool retires_donated);

  int index() const { return index_; }  // position among the client's addressable devices
  const DeviceDescription& description() const { return description_; }
  const std::string& debug_string() const { return debug_string_; }
  PJRT_Device* raw() const { return raw_; }
  const PJRT_Api& api() const { return *api_; }

  MemoryStats memory_stats() const;
  void reset_peak() const;
  void reset_accumulated() const;

  // What the plugin's allocator reports; empty if it has no statistics.
  std::optional<PJRT_Device_MemoryStats_Args> allocator_stats() const;

  // Whether all executions enqueued so far are over.
  bool is_idle() const;

  // Waits for all executions enqueued so far, and all uploads. Throws if one of them failed.
  void await() const;

  // For the reader of a failed result: the failure, if it was not reported yet (in_flight.h).
  std::optional<Error> take_failure() const { return in_flight_->take_failure_of_result(); }

  // `await` waits for the buffer, too.
  void note_upload(const Buffer& buffer) const;

 private:
  friend class Buffer;
  friend class Executable;

  // On the heap because atomics cannot move and Devices live in a vector.
  struct Usage {
    struct Tally {
      std::atomic<int64_t> current{0}, peak{0}, allocated{0};
      std::atomic<int64_t> allocated_before{0}, freed_before{0};  // at the last reset_accumulated
      void add(int64_t amount);
      void remove(int64_t amount);
      MemoryStats::Tally read() const;
      void reset_accumulated();
    };
    Tally buffers, bytes;
    void add(int64_t size, int64_t count = 1);  // adds `count` buffers, `size` bytes in all
    void remove(int64_t size, int64_t count = 1);
  };

  const PJRT_Api* api_;
  PJRT_Device* raw_;
  int index_;
  DeviceDescription description_;
  std::string debug_string_;
  std::unique_ptr<Usage> usage_;
  bool retires_donated_;
  std::unique_ptr<InFlight> in_flight_;
};

// How many programs are being compiled now, by all threads.
int compiling();

class Client {
 public:
  // Starts the plugin's devices. `options` are the plugin's own, for example cpu_device_count.
  // `compile_options` has, by what a client calls itself, those that all its programs are compiled
  // with, as far as the compiler knows them. With several `processes`, each of them starts one, and
  // all wait for the others.
  static std::unique_ptr<Client> create(
      const Plugin& plugin, const NamedValues& options = {},
      const std::map<std::string, CompileOptions>& compile_options = {},
      const Processes& processes = {});

  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const Plugin& plugin() const { return plugin_; }
  const PJRT_Api& api() const { return plugin_.api(); }
  PJRT_Client* raw() const { return raw_; }
  const std::string& platform_name() const { return platform_name_; }  // "cpu", "cuda", "tpu"
  const std::string& platform_version() const { return platform_version_; }

  // The addressable devices; element i has index() i.
  const std::vector<Device>& devices() const { return devices_; }

  // The ids of the devices of all processes: those of the first one in its order, then those of
  // the next. The addressable ones are those from `first_device` on.
  const std::vector<int64_t>& all_devices() const { return all_devices_; }
  int first_device() const { return first_device_; }
  // The process of the device at this position.
  int process_of(int position) const { return process_of_.at(position); }

  // Whether other processes' devices are among them; programs may then use these, too.
  bool spans_processes() const { return all_devices_.size() > devices_.size(); }
  const Processes& processes() const { return processes_; }

  // Compiles `code`. Format "mlir" takes MLIR text, MLIR bytecode or a StableHLO portable artifact.
  // `options` take precedence over the client's own; an error that they cause says so.
  std::unique_ptr<Executable> compile(std::string_view code, std::string_view format,
                                      const CompileOptions& options) const;
  const CompileOptions& compile_options() const { return compile_options_; }

  // Throws the compiler's error for options that it does not accept: compiles a program that
  // returns its input.
  void check_options(const CompileOptions& options) const;

  // Loads what CompiledProgram::serialize gave, under the same platform and plugin version.
  std::unique_ptr<Executable> deserialize(std::string_view serialized) const;

  // Copies host data to a device. `byte_strides` has one entry per dimension, or is empty for dense
  // row-major data. The buffer never aliases `data`, which may be changed or freed on return; the
  // transfer itself may still be under way then.
  Buffer buffer_from_host(const void* data, PJRT_Buffer_Type type, std::span<const int64_t> dims,
                          std::span<const int64_t> byte_strides, const Device& device) const;

  // Lets devices fetch this host memory themselves, until it is unmapped. False if the plugin does
  // not offer that, or not for this memory.
  bool map_host_memory(void* data, size_t nbytes) const;
  void unmap_host_memory(void* data) const;

  // A buffer of dense row-major host memory, which the caller must not change until `done` is
  // called, from any thread. No execution writes to it. The semantics are one of these:
  //
  //   kImmutableUntilTransferCompletes  mapped memory is copied to the device, and not on the host
  //                                     before; `done` when the device has it
  //   kImmutableZeroCopy                the buffer is on that memory itself if the device is the
  //                                     host and the plugin accepts the alignment, else it is a
  //                                     copy; `done` when the buffer is freed, or the copy made
  //   kMutableZeroCopy                  the same, but executions that the buffer is donated to
  //                                     write to the memory
  Buffer buffer_from_lasting_memory(PJRT_HostBufferSemantics semantics, const void* data,
                                    PJRT_Buffer_Type type, std::span<const int64_t> dims,
                                    const Device& device, std::function<void()> done) const;

 private:
  Client(const Plugin& plugin, const Processes& processes)
      : plugin_(plugin), processes_(processes) {}
  void start(const NamedValues& options);
  void find_devices();
  void find_others_devices();
  void keep_known(const CompileOptions& options);
  std::unique_ptr<Executable> compile_unchecked(std::string_view code, std::string_view format,
                                                const CompileOptions& options) const;
  void blame_options(const CompileOptions& options) const;  // throws if they caused the error

  ClientStarted started_;
  const Plugin& plugin_;
  Processes processes_;
  PJRT_Client* raw_ = nullptr;
  std::string platform_name_;
  std::string platform_version_;
  std::vector<Device> devices_;
  std::vector<int64_t> all_devices_;
  std::vector<int> process_of_;  // parallel to all_devices_
  int first_device_ = 0;
  CompileOptions compile_options_;
};

}  // namespace lazyxla::pjrt
