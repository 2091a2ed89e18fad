#include "graph/execute.h"

#include <c10/util/Exception.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "common/counters.h"
#include "common/gil.h"
#include "graph/partitioned_run.h"
#include "graph/runner.h"
#include "pjrt/client.h"
#include "pjrt/host_memory.h"
#include "pjrt/runtime.h"
#include "program/replicas.h"
#include "program/stages.h"

namespace lazyxla::graph {
namespace {

auto& descriptions = *new TensorDescriptions();

std::string describe_largest(c10::DeviceIndex device) {
  const std::string lines = descriptions.largest ? descriptions.largest(device) : "";
  return lines.empty() ? ""
                       : c10::str("\nThe largest tensors on lazyxla:", int{device}, ":\n", lines);
}

// The values of some slots, as one small array on each device.
template <typename T>
void upload_slots(const std::vector<uint32_t>& which, c10::ArrayRef<ir::ScalarValue> slots,
                  T ir::ScalarValue::* member, PJRT_Buffer_Type type,
                  c10::ArrayRef<const pjrt::Device*> devices, Numbers& numbers) {
  if (which.empty()) return;
  c10::SmallVector<T, 16> values;
  for (uint32_t slot : which) values.push_back(slots[slot].*member);
  const int64_t dims[] = {static_cast<int64_t>(values.size())};
  for (const pjrt::Device* device : devices) {
    numbers.push_back(
        pjrt::Runtime::get().client().buffer_from_host(values.data(), type, dims, {}, *device));
  }
}

// Bytes that a program can still get on a device, or at least `needed`; empty if the plugin does
// not report them.
std::optional<int64_t> free_memory(const pjrt::Device& device, int64_t needed) {
  if (const auto stats = device.allocator_stats(); stats && stats->bytes_limit_is_set) {
    return stats->bytes_limit - stats->bytes_in_use;
  }
  if (pjrt::Runtime::get().platform() != "cpu") return std::nullopt;
  return pjrt::free_host_memory(needed);
}

// Smaller programs are not checked: the query takes longer than they do.
constexpr int64_t kSmall = int64_t{64} << 20;

// Throws if the program needs more memory than is free. Donated inputs count as free: they are
// reused.
void check_fits(const program::Variant& variant, const Run& run, const pjrt::Device& device) {
  int64_t needed = variant.bytes_needed();
  if (needed < kSmall) return;
  for (int number : run.donated) {
    needed -= static_cast<int64_t>(run.inputs[number]->get().nbytes());
  }
  check_free(variant, needed, device);
}

// Breaks promises for a reason, which every read of them reports.
void break_promises(c10::ArrayRef<program::BufferRef> promises, const std::string& reason,
                    program::Failure failure) {
  static const std::string why =
      "lazyxla: this value was not computed, because running the recorded operators failed "
      "before: ";
  // The reason may be that an input was not computed; the first failure is reported once.
  const std::string text = reason.starts_with(why) ? reason : why + reason;
  for (const program::BufferRef& promise : promises) {
    if (promise->is_kept()) continue;  // by a stage that ran
    promise->break_promise(text, failure);
  }
}

// A sentence that names the tensors whose data was lost with a failed program.
std::string describe_lost(const std::vector<const void*>& lost) {
  if (lost.empty()) return "";
  std::string names = descriptions.names ? descriptions.names(lost) : "";
  std::string text = ". " + std::to_string(lost.size()) +
                     (lost.size() == 1 ? " tensor is" : " tensors are") +
                     " lost, since the program had taken the memory over";
  return names.empty() ? text : text + ": " + names;
}

}  // namespace

void check_free(const program::Variant& variant, int64_t needed, const pjrt::Device& device) {
  const auto free = needed < kSmall ? std::nullopt : free_memory(device, needed);
  if (!free || needed <= *free) return;
  const std::string where = variant.line.empty() ? "" : variant.line + ": ";
  TORCH_CHECK_WITH(OutOfMemoryError, false, "lazyxla: out of device memory: ", where,
                   "the program needs ", needed, " bytes, and ", std::max<int64_t>(*free, 0),
                   " are free on ", device.debug_string(),
                   ". It was not run, and all tensors are as they were before.",
                   describe_largest(static_cast<c10::DeviceIndex>(device.index())));
}

void upload_numbers(const program::Variant& variant, c10::ArrayRef<ir::ScalarValue> slots,
                    c10::ArrayRef<const pjrt::Device*> devices, Numbers& numbers) {
  upload_slots(variant.float_slots, slots, &ir::ScalarValue::f, PJRT_Buffer_Type_F64, devices,
               numbers);
  upload_slots(variant.int_slots, slots, &ir::ScalarValue::i, PJRT_Buffer_Type_S64, devices,
               numbers);
}

pjrt::InFlight::Listener undo_on_failure(std::shared_ptr<std::vector<Replaced>> replaced,
                                         c10::DeviceIndex device) {
  return [=](const pjrt::Error* failure) -> std::optional<pjrt::Error> {
    std::vector<Replaced> all = std::exchange(*replaced, {});
    if (!failure) return std::nullopt;
    const std::string lost = describe_lost(undo(device, std::move(all), /*was_run=*/true));
    return pjrt::Error(failure->code(), failure->what() + lost);
  };
}

const pjrt::Device& pjrt_device(c10::DeviceIndex device) {
  const auto& devices = pjrt::Runtime::get().client().devices();
  TORCH_CHECK(device >= 0 && static_cast<size_t>(device) < devices.size(),
              "lazyxla: invalid device ordinal ", static_cast<int>(device), ": there are ",
              devices.size(), " devices");
  return devices[device];
}

void set_tensor_descriptions(TensorDescriptions given) { descriptions = std::move(given); }

void rethrow(const pjrt::Error& error, const std::string& doing,
             std::optional<c10::DeviceIndex> device) {
  TORCH_CHECK_WITH(OutOfMemoryError, error.code() != PJRT_Error_Code_RESOURCE_EXHAUSTED,
                   "lazyxla: out of device memory while ", doing, ": ", error.what(),
                   device ? describe_largest(*device) : "");
  TORCH_CHECK_WITH(LinAlgError, error.code() != pjrt::kOutsideDomain, "lazyxla: ", doing, ": ",
                   error.what());
  TORCH_CHECK(false, "lazyxla: ", doing, ": ", error.what());
}

void keeping(const Run& run, c10::DeviceIndex device, c10::function_ref<void()> action) {
  using program::Failure;
  auto fail = [&](const std::string& reason, Failure failure = Failure::kOther) {
    // Before the promises are broken: who reads one reports it.
    if (!run.replaced.empty()) note_if_unattended(device);
    rewind(run.draws);
    const std::string lost =
        describe_lost(undo(device, std::move(run.replaced), /*was_run=*/false));
    break_promises(run.promises, reason + lost, failure);
  };
  try {
    try {
      action();
    } catch (const pjrt::Error& e) {
      rethrow(e, "running the recorded operators", device);
    }
  } catch (const c10::Error& e) {
    fail(e.what_without_backtrace(), program::failure_of(e));
    throw;
  } catch (const std::exception& e) {
    fail(e.what());
    throw;
  }
}

namespace {

void keep(const Run& run, std::vector<pjrt::Buffer> results) {
  TORCH_INTERNAL_ASSERT(results.size() == run.promises.size());
  for (size_t i = 0; i < results.size(); ++i) run.promises[i]->keep(std::move(results[i]));
}

void enqueue_own(const program::Variant& variant, const Run& run, c10::DeviceIndex index) {
  const pjrt::Device& device = pjrt_device(index);
  c10::SmallVector<pjrt::Buffer*, 16> args;
  for (const program::BufferRef& input : run.inputs) args.push_back(&input->on(device));
  variant.note_run();
  if (variant.host_program()) {
    keep(run, program::run(*variant.host_program(), args, run.slots, device));
    run.replaced.clear();
    return;
  }
  Numbers numbers;
  upload_numbers(variant, run.slots, &device, numbers);
  for (pjrt::Buffer& array : numbers) args.push_back(&array);
  keep(run, undoable(run, index, [&](pjrt::InFlight::Listener over) {
         return variant.executable().execute(args, run.donated, device, std::move(over));
       }));
}

// The turn that a token holds. It is read from the device only if the host has not seen it before.
int64_t turn_of(program::DeviceBuffer& token) {
  int64_t turn = token.turn;
  if (turn >= 0) return turn;
  token.get().to_host(&turn, sizeof(turn));
  return token.turn = turn;
}

// Does not check whether it fits. `has_parts`: of a whole graph of several processes.
program::Launched enqueue(const program::Variant& variant, const Run& run, c10::DeviceIndex index,
                          bool has_parts = false) {
  const auto launch = [&] { enqueue_own(variant, run, index); };
  if (!variant.replicas) {
    launch();
    return program::Launched::kYes;
  }
  WithoutGil no_gil;  // other processes are waited for
  const program::Replicas& replicas = *variant.replicas;
  const int64_t turn = turn_of(*run.inputs[replicas.token_input]);
  if (replicas.by_host) {
    launch();
  } else {
    const program::Identity* whole = replicas.is_whole ? variant.identity.get() : nullptr;
    const program::Launched launched =
        program::collectives().launch(replicas, turn, whole, has_parts, launch);
    if (launched != program::Launched::kYes) return launched;
  }
  run.promises[replicas.token_result]->turn = turn + replicas.calls;
  return program::Launched::kYes;
}

// A run of a stage, which owns its parts.
struct StageRun {
  std::vector<program::BufferRef> inputs, promises;
  std::vector<int> donated;
  std::vector<ir::ScalarValue> slots;
  std::vector<Replaced> replaced;
};

std::vector<StageRun> stage_runs(const program::Variant& variant, const Run& run) {
  std::vector<program::BufferRef> buffers(run.inputs.begin(), run.inputs.end());
  buffers.insert(buffers.end(), run.promises.begin(), run.promises.end());
  for (size_t i = 0; i < variant.handed_on; ++i) buffers.push_back(program::make_buffer());
  std::vector<StageRun> runs;
  ska::flat_hash_map<const program::DeviceBuffer*, size_t> stage_of;  // of a promise
  for (const program::StageProgram& stage : variant.stages) {
    StageRun each;
    for (uint32_t input : stage.inputs) each.inputs.push_back(buffers[input]);
    for (uint32_t output : stage.outputs) {
      each.promises.push_back(buffers[output]);
      stage_of[buffers[output].get()] = runs.size();
    }
    for (uint32_t slot : stage.slots) each.slots.push_back(run.slots[slot]);
    for (int input : stage.donatable) {
      const auto whole = static_cast<int>(stage.inputs[input]);
      if (std::binary_search(run.donated.begin(), run.donated.end(), whole)) {
        each.donated.push_back(input);
      }
    }
    runs.push_back(std::move(each));
  }
  for (Replaced& replaced : run.replaced) {
    const program::BufferRef promise = replaced.promise.lock();
    if (promise) runs[stage_of.at(promise.get())].replaced.push_back(std::move(replaced));
  }
  run.replaced.clear();
  return runs;
}

std::vector<Replaced> copies(const std::vector<Replaced>& all) {
  std::vector<Replaced> made;
  for (const auto& [id, content, promise] : all) {
    auto base = content.base ? std::make_unique<ir::Geometry>(*content.base) : nullptr;
    made.push_back({id, {content.value, std::move(base)}, promise});
  }
  return made;
}

// If a stage fails, it is undone, and so are those before it unless one has consumed something.
void execute_stages(const program::Variant& variant, const Run& run, c10::DeviceIndex index) {
  variant.note_run();
  std::vector<StageRun> runs = stage_runs(variant, run);
  std::vector<Replaced> undoable;
  size_t next = 0;
  try {
    for (size_t i = 0; i < runs.size(); ++i) {
      StageRun& each = runs[i];
      const Run stage{each.inputs,   each.donated,  each.slots,
                      each.promises, each.replaced, run.draws};
      check_fits(*variant.stages[i].variant, stage, pjrt_device(index));
    }
    for (; next < runs.size(); ++next) {
      StageRun& each = runs[next];
      for (Replaced& replaced : undoable) each.replaced.push_back(std::move(replaced));
      undoable = each.donated.empty() ? copies(each.replaced) : std::vector<Replaced>();
      const Run stage{each.inputs,   each.donated,  each.slots,
                      each.promises, each.replaced, run.draws};
      enqueue(*variant.stages[next].variant, stage, index);
      if (next > 0) ++Counters::get().executions;
      each.inputs.clear();  // drops what no other stage needs
      each.promises.clear();
    }
  } catch (...) {
    for (; next < runs.size(); ++next) {
      for (Replaced& each : runs[next].replaced) run.replaced.push_back(std::move(each));
    }
    throw;
  }
}

// A whole graph of several processes, if all of them have it; else nothing is done.
program::Launched execute_whole(const program::Variant& variant, const Run& run,
                                c10::DeviceIndex index, bool has_parts) {
  variant.note_run();
  StageRun whole = std::move(stage_runs(variant, run).front());
  const program::Variant& program = *variant.stages.front().variant;
  program::Launched launched = program::Launched::kNo;
  const auto give_back = [&] { run.replaced = std::move(whole.replaced); };
  try {
    const Run stage{whole.inputs,   whole.donated,  whole.slots,
                    whole.promises, whole.replaced, run.draws};
    check_fits(program, stage, pjrt_device(index));
    launched = enqueue(program, stage, index, has_parts);
  } catch (...) {
    give_back();
    throw;
  }
  if (launched == program::Launched::kYes) return launched;
  give_back();
  if (launched == program::Launched::kNumbersDiffer) {
    program.note_other_numbers();
    variant.note_other_numbers();
  }
  return launched;
}

// Makes and runs another form of a whole graph, as all members do now. If this process fails, it
// tells those that wait for it.
void execute_other_form(const program::Variant& variant, const Run& run,
                        c10::function_ref<void()> action) {
  try {
    action();
  } catch (const std::exception& error) {
    WithoutGil no_gil;
    const program::StageProgram& whole = variant.stages.front();
    const program::Replicas& replicas = *whole.variant->replicas;
    const int64_t turn = turn_of(*run.inputs[whole.inputs[replicas.token_input]]);
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    program::collectives().give_up(replicas, turn,
                                   ours ? ours->what_without_backtrace() : error.what());
    throw;
  }
}

void execute_of_all(const program::Variant& variant, const Run& run, c10::DeviceIndex index) {
  const bool has_parts = variant.apart->has_pieces(run.slots);
  program::Launched launched = execute_whole(variant, run, index, has_parts);
  if (launched == program::Launched::kNumbersDiffer) {
    execute_other_form(variant, run, [&] {
      launched = execute_whole(*variant.apart->whole(run.slots), run, index, has_parts);
    });
  }
  if (launched == program::Launched::kYes) return;
  execute_other_form(variant, run,
                     [&] { execute_stages(*variant.apart->pieces(run.slots), run, index); });
}

}  // namespace

bool would_wait(const program::Variant& variant, const Run& run) {
  if (!variant.runs_on_host()) return false;
  bool on_device = false;
  for (const program::StageProgram& stage : variant.stages) {
    const bool on_host = stage.variant->runs_on_host();
    if (on_host && on_device) return true;
    on_device = on_device || !on_host;
  }
  return !std::all_of(run.inputs.begin(), run.inputs.end(), [](const program::BufferRef& input) {
    return input->is_kept() && input->is_ready();
  });
}

void execute(const program::Variant& variant, const Run& run, c10::DeviceIndex index) {
  if (variant.apart) return execute_of_all(variant, run, index);
  if (!variant.stages.empty()) return execute_stages(variant, run, index);
  if (variant.partition) return execute_partitioned(variant, run, index);
  check_fits(variant, run, pjrt_device(index));
  enqueue(variant, run, index);
}

void wait_for(c10::DeviceIndex device) {
  if (!pjrt::Runtime::get().initialized()) return;
  WithoutGil no_gil;
  try {
    if (ir::Mesh::any()) return await_all_devices();
    pjrt_device(device).await();
  } catch (const pjrt::Error& e) {
    rethrow(e, "waiting for the device");
  }
}

}  // namespace lazyxla::graph
