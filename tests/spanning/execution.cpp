// Running a program whose devices belong to several processes.
//
// Real devices send one another what collectives need while they run. Here the processes exchange
// all arguments before, and each runs the whole program on its own CPU client, on which every
// device of the others has a stand-in; of the results it keeps those of its own devices. As each
// process computes with the others' arguments, so do the collectives.
#include <algorithm>
#include <atomic>

#include "call.h"
#include "record.h"
#include "state.h"

namespace spanning {
namespace {

std::atomic<int64_t> run_count{0};

void destroy_buffer(PJRT_Buffer* buffer) {
  if (buffer == nullptr) return;
  SPANNING_ARGS(args, PJRT_Buffer_Destroy);
  args.buffer = buffer;
  if (PJRT_Error* error = cpu()->PJRT_Buffer_Destroy(&args)) destroy(error);
}

void destroy_event(PJRT_Event* event) {
  if (event == nullptr) return;
  SPANNING_ARGS(args, PJRT_Event_Destroy);
  args.event = event;
  if (PJRT_Error* error = cpu()->PJRT_Event_Destroy(&args)) destroy(error);
}

// Buffers on stand-ins. What runs with them keeps their memory as long as it needs it, and whether
// it was donated makes no difference to who frees the handles.
struct StandIns {
  std::vector<PJRT_Buffer*> buffers;
  ~StandIns() { std::ranges::for_each(buffers, destroy_buffer); }
};

std::string key_of(const Program& program, int64_t run, int process) {
  return "spanning/run/" + program.ids + "/" + std::to_string(run) + "/" + std::to_string(process);
}

void check_call(const Program& program, const PJRT_LoadedExecutable_Execute_Args& args) {
  if (args.num_devices != program.addressable_devices.size()) {
    fail(PJRT_Error_Code_INVALID_ARGUMENT, "arguments for " + std::to_string(args.num_devices) +
                                               " devices, of which the program has " +
                                               std::to_string(program.addressable_devices.size()) +
                                               " in this process");
  }
  if (SPANNING_HAS(&args, PJRT_LoadedExecutable_Execute_Args, execute_device) &&
      args.execute_device != nullptr) {
    fail(PJRT_Error_Code_UNIMPLEMENTED, "a program of several processes on one device alone");
  }
  if (args.options != nullptr && args.options->num_send_ops + args.options->num_recv_ops > 0) {
    fail(PJRT_Error_Code_UNIMPLEMENTED, "send and receive callbacks over several processes");
  }
}

// This process' record; a failure becomes part of it, so that the others need not wait in vain.
Record own_record(const Program& program, const PJRT_LoadedExecutable_Execute_Args& args) {
  Record record{.fingerprint = program.fingerprint, .failure = {}, .arguments = {}};
  PJRT_Error* error = guarded([&] {
    check_call(program, args);
    for (size_t device = 0; device < args.num_devices; ++device) {
      std::vector<Value>& row = record.arguments.emplace_back();
      for (size_t i = 0; i < args.num_args; ++i) {
        row.push_back(Value::of(args.argument_lists[device][i]));
      }
    }
  });
  if (error != nullptr) {
    record.failure = message_of(error);
    destroy(error);
    record.arguments.clear();
  }
  return record;
}

// Another process' record of this run. That it does not come breaks the group.
Record get_record(const Program& program, Group& group, int64_t run, int process) {
  const Client& client = *program.client;
  std::string bytes;
  PJRT_Error* error =
      guarded([&] { bytes = client.store.get(key_of(program, run, process), client.timeout_ms); });
  if (error == nullptr) return Record::decode(bytes);
  group.broken = "processes launched different programs: process " + std::to_string(process) +
                 " launched none within " + std::to_string(client.timeout_ms) +
                 " ms as execution " + std::to_string(run) + " on devices " + program.ids + " (" +
                 message_of(error) + ")";
  destroy(error);
  fail(PJRT_Error_Code_INTERNAL, group.broken);
}

// The records of all processes that take part, this one's included, in the order of
// `program.processes`.
std::vector<Record> exchange(const Program& program, Group& group, Record own) {
  Client& client = *program.client;
  const int64_t run = group.runs++;
  const std::string key = key_of(program, run, client.node);
  client.store.put(key, own.encode());
  std::vector<Record> records;
  for (const int process : program.processes) {
    if (process == client.node) {
      records.push_back(std::move(own));
    } else {
      records.push_back(get_record(program, group, run, process));
    }
  }
  // Whoever has launched this run has read all records of the run before.
  if (!group.last_key.empty()) client.store.clear(group.last_key);
  group.last_key = key;

  for (size_t i = 0; i < records.size(); ++i) {
    if (records[i].fingerprint != program.fingerprint) {
      fail(PJRT_Error_Code_INTERNAL, "processes launched different programs: process " +
                                         std::to_string(program.processes[i]) +
                                         " another than process " + std::to_string(client.node) +
                                         " as execution " + std::to_string(run) + " on devices " +
                                         program.ids);
    }
  }
  for (size_t i = 0; i < records.size(); ++i) {
    if (!records[i].failure.empty()) {
      fail(PJRT_Error_Code_INTERNAL, "process " + std::to_string(program.processes[i]) +
                                         " could not launch the program: " + records[i].failure);
    }
  }
  return records;
}

// The lists of one execution on all devices.
struct Lists {
  std::vector<std::vector<PJRT_Buffer*>> arguments, outputs;
  std::vector<PJRT_Buffer* const*> argument_lists;
  std::vector<PJRT_Buffer**> output_lists;
  std::vector<PJRT_Event*> events;
};

// The caller's arguments on its devices, and the others' values on the stand-ins for theirs.
Lists make_lists(const Program& program, const PJRT_LoadedExecutable_Execute_Args& args,
                 const std::vector<Record>& records, StandIns& stand_ins) {
  const Client& client = *program.client;
  Lists lists;
  std::map<int, size_t> next;  // of each process' devices
  for (size_t device = 0; device < program.devices.size(); ++device) {
    const int process = program.process_of[device];
    const size_t row = next[process]++;
    std::vector<PJRT_Buffer*>& arguments = lists.arguments.emplace_back();
    lists.outputs.emplace_back(program.num_outputs, nullptr);
    if (process == client.node) {
      arguments.assign(args.argument_lists[row], args.argument_lists[row] + args.num_args);
      continue;
    }
    const auto found = std::ranges::find(program.processes, process);
    for (const Value& value : records[found - program.processes.begin()].arguments.at(row)) {
      stand_ins.buffers.push_back(value.on(client.raw, program.devices[device]));
      arguments.push_back(stand_ins.buffers.back());
    }
    if (arguments.size() != args.num_args) {
      fail(PJRT_Error_Code_INTERNAL, "process " + std::to_string(process) + " gave " +
                                         std::to_string(arguments.size()) + " arguments, not " +
                                         std::to_string(args.num_args));
    }
  }
  for (size_t device = 0; device < program.devices.size(); ++device) {
    lists.argument_lists.push_back(lists.arguments[device].data());
    lists.output_lists.push_back(lists.outputs[device].data());
  }
  lists.events.assign(program.devices.size(), nullptr);
  return lists;
}

void execute_spanning(const Program& program, PJRT_LoadedExecutable_Execute_Args& args) {
  Client& client = *program.client;
  Group& group = client.group(program.ids);
  std::lock_guard one_at_a_time(group.mutex);
  if (!group.broken.empty()) {
    fail(PJRT_Error_Code_INTERNAL, "an execution before has failed: " + group.broken);
  }
  const std::vector<Record> records = exchange(program, group, own_record(program, args));
  StandIns stand_ins;
  Lists lists = make_lists(program, args, records, stand_ins);

  SPANNING_ARGS(all, PJRT_LoadedExecutable_Execute);
  all.executable = args.executable;
  all.options = args.options;
  all.argument_lists = lists.argument_lists.data();
  all.num_devices = program.devices.size();
  all.num_args = args.num_args;
  all.output_lists = lists.output_lists.data();
  all.device_complete_events = args.device_complete_events ? lists.events.data() : nullptr;
  {
    std::lock_guard lock(client.launching);
    SPANNING_CALL(PJRT_LoadedExecutable_Execute, all);
  }
  ++run_count;

  size_t row = 0;
  for (size_t device = 0; device < program.devices.size(); ++device) {
    if (program.process_of[device] != client.node) {
      std::ranges::for_each(lists.outputs[device], destroy_buffer);
      destroy_event(lists.events[device]);
      continue;
    }
    std::ranges::copy(lists.outputs[device], args.output_lists[row]);
    if (args.device_complete_events) args.device_complete_events[row] = lists.events[device];
    ++row;
  }
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  return guarded([&] {
    const auto program = state().program(args->executable);
    if (program != nullptr && program->spans_processes()) return execute_spanning(*program, *args);
    if (SPANNING_HAS(args, PJRT_LoadedExecutable_Execute_Args, execute_device)) {
      const Device* device = state().device(args->execute_device);
      if (device != nullptr && !device->is_addressable()) {
        fail(PJRT_Error_Code_INVALID_ARGUMENT,
             "an execution on a device of process " + std::to_string(device->process()));
      }
    }
    check(cpu()->PJRT_LoadedExecutable_Execute(args));
  });
}

}  // namespace

int64_t runs() { return run_count; }

void wrap_execution(PJRT_Api& api) { api.PJRT_LoadedExecutable_Execute = &execute; }

}  // namespace spanning
