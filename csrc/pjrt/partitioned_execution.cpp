// Executions of programs that are partitioned over several devices.
#include <algorithm>
#include <mutex>

#include "buffer.h"
#include "call.h"
#include "client.h"
#include "executable.h"
#include "fork.h"

namespace lazyxla::pjrt {
namespace {

// Devices that meet in a program must come to their programs in the same order.
std::mutex& enqueueing() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

bool is_taken(const PJRT_Api* api, PJRT_Buffer* raw) {
  LAZYXLA_PJRT_ARGS(args, PJRT_Buffer_IsDeleted);
  args.buffer = raw;
  return !ignore_error(api, api->PJRT_Buffer_IsDeleted(&args)) && args.is_deleted;
}

// Of a run's listener: it is called when the last device is done, with the first failure.
class LastOf {
 public:
  LastOf(size_t devices, InFlight::Listener over) : left_(devices), over_(std::move(over)) {}

  std::string end(const Error* failure) {
    {
      std::lock_guard lock(mutex_);
      if (failure && !failure_) failure_ = *failure;
      if (--left_ > 0) return "";
    }
    return over_(failure_ ? &*failure_ : nullptr);
  }

 private:
  std::mutex mutex_;
  size_t left_;
  std::optional<Error> failure_;
  InFlight::Listener over_;
};

// The arrays that one call of the C API needs, a row for each device.
struct Rows {
  std::vector<std::vector<PJRT_Buffer*>> args, outputs;
  std::vector<PJRT_Buffer* const*> arg_lists;
  std::vector<PJRT_Buffer**> output_lists;

  void add(std::span<Buffer* const> buffers, size_t num_outputs) {
    auto& row = args.emplace_back();
    row.reserve(buffers.size());
    for (const Buffer* buffer : buffers) {
      if (buffer->is_deleted()) {
        throw Error(PJRT_Error_Code_FAILED_PRECONDITION,
                    "argument " + std::to_string(row.size()) +
                        " is a buffer whose memory an "
                        "earlier execution has taken (it was donated)");
      }
      row.push_back(buffer->raw());
    }
    outputs.emplace_back(num_outputs, nullptr);
  }
  void list() {
    for (auto& row : args) arg_lists.push_back(row.data());
    for (auto& row : outputs) output_lists.push_back(row.data());
  }
};

}  // namespace

std::vector<size_t> Executable::order_of(std::span<const Device* const> devices) const {
  std::vector<size_t> order;
  for (PJRT_Device* raw : devices_) {
    const auto found = std::find_if(devices.begin(), devices.end(),
                                    [raw](const Device* device) { return device->raw() == raw; });
    if (found != devices.end()) order.push_back(found - devices.begin());
  }
  if (order.size() != devices.size() || order.size() != devices_.size()) {
    throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                "the program was compiled for other devices than it is to run on");
  }
  return order;
}

std::vector<std::vector<Buffer>> Executable::execute_on_each(
    std::span<const std::vector<Buffer*>> args, std::span<const int> donated_args,
    std::span<const Device* const> devices, InFlight::Listener over) const {
  check_not_forked();
  const std::vector<size_t> order = order_of(devices);
  Rows rows;
  for (size_t device : order) rows.add(args[device], num_outputs_);
  rows.list();
  std::vector<int64_t> kept;
  for (size_t i = 0; i < args[0].size(); ++i) {
    const bool is_donated = std::binary_search(donated_args.begin(), donated_args.end(), i);
    if (!is_donated) kept.push_back(static_cast<int64_t>(i));
  }
  PJRT_ExecuteOptions options{};
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  options.non_donatable_input_indices = kept.data();
  options.num_non_donatable_input_indices = kept.size();
  std::vector<PJRT_Event*> done(devices.size(), nullptr);
  LAZYXLA_PJRT_ARGS(call, PJRT_LoadedExecutable_Execute);
  call.executable = raw_;
  call.options = &options;
  call.argument_lists = rows.arg_lists.data();
  call.num_devices = devices.size();
  call.num_args = args[0].size();
  call.output_lists = rows.output_lists.data();
  call.device_complete_events = done.data();
  PJRT_Error* error;
  {
    std::lock_guard lock(enqueueing());
    error = call_plugin(call);
  }

  if (error == nullptr) learn_output_nbytes(rows.outputs[0]);
  std::vector<std::vector<Buffer>> outputs(devices.size());
  const auto last = over ? std::make_shared<LastOf>(devices.size(), std::move(over)) : nullptr;
  for (size_t row = 0; row < order.size(); ++row) {
    const Device& device = *devices[order[row]];
    // Before the outputs are counted: what is donated must not count twice.
    std::vector<PJRT_Buffer*> taken;
    taken.reserve(donated_args.size());
    for (const int position : donated_args) {
      if (error != nullptr && !is_taken(api_, rows.args[row][position])) continue;
      if (PJRT_Buffer* handle = args[order[row]][position]->consume()) taken.push_back(handle);
    }
    if (done[row] == nullptr || !device.retires_donated_) {
      for (PJRT_Buffer* handle : taken) destroy_buffer(api_, handle);
      taken.clear();
    }
    outputs[order[row]].reserve(num_outputs_);
    for (size_t i = 0; error == nullptr && i < num_outputs_; ++i) {
      outputs[order[row]].emplace_back(device, rows.outputs[row][i], output_nbytes_[i]);
    }
    if (done[row] == nullptr) continue;
    InFlight::Listener listener;
    if (error == nullptr && last) {
      listener = [last](const Error* failure) { return last->end(failure); };
    }
    device.in_flight_->add(done[row], taken, std::move(listener));
  }
  check(api_, error, "PJRT_LoadedExecutable_Execute");
  return outputs;
}

}  // namespace lazyxla::pjrt
