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

#include "buffer.h"
#include "executable.h"
#include "fork.h"
#include "in_flight.h"
#include "plugin.h"

namespace lazyxla::pjrt {

// What our own Buffers occupy on a device. Kept by us because not every plugin has allocator
// statistics (the CPU one has none). Memory that an execution needs for itself is not in it.
struct MemoryStats {
  int64_t live_buffers = 0;
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;  // the most live_bytes since the start or the last reset_peak
};

// What the plugin's allocator says; fields it leaves out are empty.
struct AllocatorStats {
  int64_t bytes_in_use = 0;
  std::optional<int64_t> peak_bytes_in_use;
  std::optional<int64_t> bytes_limit;
  std::optional<int64_t> bytes_reserved;
  std::optional<int64_t> largest_free_block_bytes;
  std::optional<int64_t> num_allocs;
};

class Device {
 public:
  // `retires_donated`: whether freeing a donated buffer's handle waits, see in_flight.h.
  Device(const PJRT_Api& api, PJRT_Device* raw, int index, bool retires_donated);

  int index() const { return index_; }  // position among the client's addressable devices
  int64_t id() const { return id_; }    // the plugin's number, unique among all processes
  const std::string& kind() const { return kind_; }  // the model, for example "TPU v5e"
  const std::string& debug_string() const { return debug_string_; }
  PJRT_Device* raw() const { return raw_; }
  const PJRT_Api& api() const { return *api_; }

  MemoryStats memory_stats() const;
  void reset_peak() const;

  // Empty if the plugin has no allocator statistics.
  std::optional<AllocatorStats> allocator_stats() const;

  // Waits for all executions enqueued so far. Throws if one of them failed.
  void await() const;

 private:
  friend class Buffer;
  friend class Executable;

  // On the heap because atomics cannot move and Devices live in a vector.
  struct Usage {
    std::atomic<int64_t> buffers{0};
    std::atomic<int64_t> bytes{0};
    std::atomic<int64_t> peak{0};
    void add(int64_t size);
    void remove(int64_t size);
  };

  const PJRT_Api* api_;
  PJRT_Device* raw_;
  int index_;
  int64_t id_;
  std::string kind_;
  std::string debug_string_;
  std::unique_ptr<Usage> usage_;
  bool retires_donated_;
  std::unique_ptr<InFlight> in_flight_;
};

class Client {
 public:
  // Starts the plugin's devices. `options` are the plugin's own, for example cpu_device_count.
  static std::unique_ptr<Client> create(const Plugin& plugin, const NamedValues& options = {});

  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  const Plugin& plugin() const { return plugin_; }
  const PJRT_Api& api() const { return plugin_.api(); }
  const std::string& platform_name() const { return platform_name_; }  // "cpu", "cuda", "tpu"
  const std::string& platform_version() const { return platform_version_; }

  // The addressable devices; element i has index() i.
  const std::vector<Device>& devices() const { return devices_; }

  // Compiles `code`. Format "mlir" takes MLIR text, MLIR bytecode or a StableHLO portable artifact.
  // `options` is what compile_options() gives: not an empty string, a proto that asks for 0
  // replicas, on which the CPU plugin aborts.
  std::unique_ptr<Executable> compile(std::string_view code, std::string_view format,
                                      std::string_view options) const;

  // Loads what CompiledProgram::serialize gave, under the same platform and plugin version. Empty
  // `compile_options` keep the ones it was compiled with.
  std::unique_ptr<Executable> deserialize(std::string_view serialized,
                                          std::string_view compile_options = {}) const;

  // Copies host data to a device. `byte_strides` has one entry per dimension, or is empty for dense
  // row-major data. The buffer never aliases `data`, which may be changed or freed on return; the
  // transfer itself may still be under way then.
  Buffer buffer_from_host(const void* data, PJRT_Buffer_Type type, std::span<const int64_t> dims,
                          std::span<const int64_t> byte_strides, const Device& device) const;

  // A buffer on dense row-major host memory itself if the device is the host and the plugin likes
  // the alignment, else a copy. The memory must stay as it is until `done` is called, from any
  // thread: when the buffer is gone, or the copy made. No execution writes to it.
  Buffer share_host_memory(const void* data, PJRT_Buffer_Type type, std::span<const int64_t> dims,
                           const Device& device, std::function<void()> done) const;

 private:
  explicit Client(const Plugin& plugin) : plugin_(plugin) {}
  void start(const NamedValues& options);

  ClientStarted started_;
  const Plugin& plugin_;
  PJRT_Client* raw_ = nullptr;
  std::string platform_name_;
  std::string platform_version_;
  std::vector<Device> devices_;
};

}  // namespace lazyxla::pjrt
