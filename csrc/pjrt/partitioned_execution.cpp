// Executions of programs that are partitioned over several devices.
#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/locks.h"
#include "pjrt/buffer.h"
#include "pjrt/call.h"
#include "pjrt/client.h"
#include "pjrt/disposal.h"
#include "pjrt/error.h"
#include "pjrt/executable.h"

namespace lazyxla::pjrt {
namespace {

// Devices that share programs must get them in the same order.
constinit OrderedMutex enqueueing;

// The end of a run: when the last device is done, the handles of what the run consumed are freed.
// Its listener is called when all have succeeded, or else with the first failure at once; those of
// other devices are taken for consequences. It owns itself until the last one is done, so that the
// listeners of the devices are plain pointers, which allocate nothing.
class EndOfRun {
 public:
  EndOfRun(const PJRT_Api& api, size_t devices, std::vector<PJRT_Buffer*> handles,
           InFlight::Listener over)
      : api_(&api), left_(devices), handles_(std::move(handles)), over_(std::move(over)) {}

  std::optional<Error> end(const Error* failure) {
    std::optional<Error> reported;
    if (failure && !has_failed_.exchange(true)) reported = over_ ? over_(failure) : *failure;
    if (--left_ > 0) return reported;
    const std::unique_ptr<EndOfRun> self(this);
    dispose_of(*api_, std::move(handles_));
    if (over_ && !has_failed_) over_(nullptr);
    return reported;
  }

 private:
  const PJRT_Api* api_;
  std::atomic<size_t> left_;
  std::atomic<bool> has_failed_{false};
  std::vector<PJRT_Buffer*> handles_;
  InFlight::Listener over_;
};

// The arrays that one call of the C API needs: a row for each device. Each thread keeps a set, as
// of execute's.
struct Rows {
  std::vector<PJRT_Buffer*> args, outputs;
  std::vector<PJRT_Buffer* const*> arg_lists;
  std::vector<PJRT_Buffer**> output_lists;
  std::vector<PJRT_Event*> done;

  void make(size_t devices, size_t num_args, size_t num_outputs) {
    args.assign(devices * num_args, nullptr);
    outputs.assign(devices * num_outputs, nullptr);
    done.assign(devices, nullptr);
    arg_lists.clear();
    output_lists.clear();
    for (size_t row = 0; row < devices; ++row) {
      arg_lists.push_back(args.data() + row * num_args);
      output_lists.push_back(outputs.data() + row * num_outputs);
    }
  }
};
thread_local Rows thread_rows;

}  // namespace

std::vector<size_t> Executable::rows_of(std::span<const Device* const> devices) const {
  std::vector<size_t> rows;
  rows.reserve(devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    PJRT_Device* raw = devices[i]->raw();
    if (i < devices_.size() && devices_[i] == raw) {  // as a rule they are in its order
      rows.push_back(i);
      continue;
    }
    const auto found = std::find(devices_.begin(), devices_.end(), raw);
    if (found != devices_.end()) rows.push_back(found - devices_.begin());
  }
  if (rows.size() != devices.size() || rows.size() != devices_.size()) {
    throw Error(PJRT_Error_Code_INVALID_ARGUMENT,
                "the program was compiled for other devices than it is to run on");
  }
  return rows;
}

std::vector<std::vector<Buffer>> Executable::execute_on_each(std::span<Buffer* const> args,
                                                             std::span<const int> donated_args,
                                                             std::span<const Device* const> devices,
                                                             InFlight::Listener over) const {
  check_not_forked();
  const size_t count = devices.size(), num_args = args.size() / count;
  const std::vector<size_t> row_of = rows_of(devices);
  Rows rows = std::exchange(thread_rows, {});
  rows.make(count, num_args, num_outputs_);
  for (size_t i = 0; i < num_args; ++i) {
    for (size_t device = 0; device < count; ++device) {
      rows.args[row_of[device] * num_args + i] = handle_of(*args[i * count + device], i);
    }
  }
  std::vector<int64_t> kept;
  for (size_t i = 0; i < num_args; ++i) {
    const bool is_donated = std::binary_search(donated_args.begin(), donated_args.end(), i);
    if (!is_donated) kept.push_back(static_cast<int64_t>(i));
  }
  PJRT_ExecuteOptions options{};
  options.struct_size = PJRT_ExecuteOptions_STRUCT_SIZE;
  options.non_donatable_input_indices = kept.data();
  options.num_non_donatable_input_indices = kept.size();
  LAZYXLA_PJRT_ARGS(call, PJRT_LoadedExecutable_Execute, executable, raw_);
  call.options = &options;
  call.argument_lists = rows.arg_lists.data();
  call.num_devices = count;
  call.num_args = num_args;
  call.output_lists = rows.output_lists.data();
  call.device_complete_events = rows.done.data();
  PJRT_Error* error;
  {
    std::lock_guard lock(enqueueing);
    error = call_plugin(call);
  }

  const std::vector<size_t>* output_nbytes = nullptr;  // null if it, or the run, failed
  std::exception_ptr failure;
  try {
    if (error == nullptr) {
      output_nbytes = &this->output_nbytes({rows.outputs.data(), num_outputs_});
    }
  } catch (...) {  // it runs nevertheless
    failure = std::current_exception();
    for (size_t i = num_outputs_; i < rows.outputs.size(); ++i) {
      destroy_buffer(api_, rows.outputs[i]);
    }
  }
  if (output_nbytes == nullptr) over = nullptr;
  // Before the outputs are counted: what is donated must not count twice.
  std::vector<PJRT_Buffer*> taken;
  taken.reserve(donated_args.size() * count);
  for (size_t device = 0; device < count; ++device) {
    int64_t buffers = 0, nbytes = 0;
    for (const int position : donated_args) {
      if (error != nullptr && !is_taken(api_, rows.arg_lists[row_of[device]][position])) continue;
      Buffer& buffer = *args[position * count + device];
      PJRT_Buffer* handle = buffer.consume(Buffer::Counted());
      if (handle == nullptr) continue;
      taken.push_back(handle);
      ++buffers;
      nbytes += static_cast<int64_t>(buffer.nbytes());
    }
    devices[device]->usage_->remove(nbytes, buffers);
  }
  std::vector<std::vector<Buffer>> outputs(num_outputs_);
  if (output_nbytes != nullptr) {
    int64_t nbytes = 0;
    for (const size_t of_output : *output_nbytes) nbytes += static_cast<int64_t>(of_output);
    for (const Device* device : devices) {
      device->usage_->add(nbytes, static_cast<int64_t>(num_outputs_));
    }
    for (size_t i = 0; i < num_outputs_; ++i) {
      outputs[i].reserve(count);
      for (size_t device = 0; device < count; ++device) {
        outputs[i].emplace_back(*devices[device], rows.output_lists[row_of[device]][i],
                                (*output_nbytes)[i], Buffer::Counted());
      }
    }
  }
  const bool retires = devices[0]->retires_donated_;
  if (!retires) dispose_of(*api_, std::exchange(taken, {}));
  const auto ended =
      std::ranges::count_if(rows.done, [](const PJRT_Event* event) { return event != nullptr; });
  if (ended == 0) {
    dispose_of(*api_, std::move(taken));
  } else {
    auto* run = new EndOfRun(*api_, ended, std::move(taken), std::move(over));
    for (size_t device = 0; device < count; ++device) {
      PJRT_Event* done = rows.done[row_of[device]];
      if (done == nullptr) continue;
      devices[device]->in_flight_->add(done, {},
                                       [run](const Error* failure) { return run->end(failure); });
    }
  }
  thread_rows = std::move(rows);
  check(api_, error, "PJRT_LoadedExecutable_Execute");
  if (failure) std::rethrow_exception(failure);
  return outputs;
}

}  // namespace lazyxla::pjrt
