// The CPU's plugin (PLUGIN), which fails when it is told to: for tests/test_transactions.py and
// tests/test_xla_options.py.
//
// fail(stage, count) has the next `count` calls of a stage fail for want of memory: "compile",
// "load", "execute", "size" (of a buffer), or "later", which runs the program and then says, a
// while after, that it failed: on its first device, or on the one that fail_on(device) tells.
// fail_after(stage, passed, count) lets so many calls pass before. unfinished() tells how many runs
// were not asked for their end. From the start as many compilations fail as the variable
// FAILING_COMPILES tells.
#include "cpu.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

char no_memory;
std::mutex mutex;
std::string stage = "compile";
int passed = 0;
size_t failing_device = 0;  // among a program's
int failures = std::atoi(std::getenv("FAILING_COMPILES") ? std::getenv("FAILING_COMPILES") : "0");
std::set<PJRT_Buffer*> failed_buffers;

bool is_ours(const PJRT_Error* error) {
  return error == reinterpret_cast<const PJRT_Error*>(&no_memory);
}

PJRT_Error* our_error() { return reinterpret_cast<PJRT_Error*>(&no_memory); }

bool fails(const char* which) {
  std::lock_guard lock(mutex);
  if (failures == 0 || stage != which) return false;
  if (passed > 0) {
    --passed;
    return false;
  }
  --failures;
  return true;
}

// An event that has failed, 20 ms after it was made.
struct Event {
  std::chrono::steady_clock::time_point ready =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
};
std::set<const void*> events;

PJRT_Event* make_event() {
  auto* event = new Event();
  std::lock_guard lock(mutex);
  events.insert(event);
  return reinterpret_cast<PJRT_Event*>(event);
}

Event* event_of(PJRT_Event* event) {
  std::lock_guard lock(mutex);
  return events.count(event) ? reinterpret_cast<Event*>(event) : nullptr;
}

PJRT_Error* event_is_ready(PJRT_Event_IsReady_Args* args) {
  Event* event = event_of(args->event);
  if (!event) return cpu()->PJRT_Event_IsReady(args);
  args->is_ready = std::chrono::steady_clock::now() >= event->ready;
  return args->is_ready ? our_error() : nullptr;
}

PJRT_Error* event_await(PJRT_Event_Await_Args* args) {
  Event* event = event_of(args->event);
  if (!event) return cpu()->PJRT_Event_Await(args);
  std::this_thread::sleep_until(event->ready);
  return our_error();
}

PJRT_Error* event_on_ready(PJRT_Event_OnReady_Args* args) {
  Event* event = event_of(args->event);
  if (!event) return cpu()->PJRT_Event_OnReady(args);
  std::thread([ready = event->ready, callback = args->callback, user = args->user_arg] {
    std::this_thread::sleep_until(ready);
    callback(our_error(), user);
  }).detach();
  return nullptr;
}

std::set<PJRT_Event*> ends;  // of runs

PJRT_Error* event_destroy(PJRT_Event_Destroy_Args* args) {
  {
    std::lock_guard lock(mutex);
    ends.erase(args->event);
  }
  Event* event = event_of(args->event);
  if (!event) return cpu()->PJRT_Event_Destroy(args);
  std::lock_guard lock(mutex);
  events.erase(event);
  delete event;
  return nullptr;
}

PJRT_Error* ready_event(PJRT_Buffer_ReadyEvent_Args* args) {
  bool failed;
  {
    std::lock_guard lock(mutex);
    failed = failed_buffers.count(args->buffer) > 0;
  }
  if (!failed) return cpu()->PJRT_Buffer_ReadyEvent(args);
  args->event = make_event();
  return nullptr;
}

PJRT_Error* destroy_buffer(PJRT_Buffer_Destroy_Args* args) {
  {
    std::lock_guard lock(mutex);
    failed_buffers.erase(args->buffer);
  }
  return cpu()->PJRT_Buffer_Destroy(args);
}

PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  return fails("compile") ? our_error() : cpu()->PJRT_Client_Compile(args);
}

PJRT_Error* load(PJRT_Executable_DeserializeAndLoad_Args* args) {
  return fails("load") ? our_error() : cpu()->PJRT_Executable_DeserializeAndLoad(args);
}

// Has a device's results of a run fail a while from now.
void fail_results(PJRT_LoadedExecutable_Execute_Args* args, size_t device) {
  PJRT_Event_Destroy_Args done{};
  done.struct_size = PJRT_Event_Destroy_Args_STRUCT_SIZE;
  done.event = args->device_complete_events[device];
  cpu()->PJRT_Event_Destroy(&done);
  args->device_complete_events[device] = make_event();
  PJRT_LoadedExecutable_GetExecutable_Args get{};
  get.struct_size = PJRT_LoadedExecutable_GetExecutable_Args_STRUCT_SIZE;
  get.loaded_executable = args->executable;
  cpu()->PJRT_LoadedExecutable_GetExecutable(&get);
  PJRT_Executable_NumOutputs_Args count{};
  count.struct_size = PJRT_Executable_NumOutputs_Args_STRUCT_SIZE;
  count.executable = get.executable;
  cpu()->PJRT_Executable_NumOutputs(&count);
  std::lock_guard lock(mutex);
  for (size_t i = 0; i < count.num_outputs; ++i)
    failed_buffers.insert(args->output_lists[device][i]);
}

PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  if (fails("execute")) return our_error();
  std::vector<bool> later(args->num_devices, false);  // by device
  if (fails("later")) later[failing_device % args->num_devices] = true;
  {
    std::lock_guard lock(mutex);  // what is computed of something that failed fails, too
    for (size_t device = 0; device < args->num_devices; ++device) {
      for (size_t i = 0; i < args->num_args; ++i) {
        if (failed_buffers.count(args->argument_lists[device][i]) > 0) later[device] = true;
      }
    }
  }
  PJRT_Error* error = cpu()->PJRT_LoadedExecutable_Execute(args);
  for (size_t device = 0; !error && device < args->num_devices; ++device) {
    if (later[device]) fail_results(args, device);
    std::lock_guard lock(mutex);
    ends.insert(args->device_complete_events[device]);
  }
  return error;
}

PJRT_Error* size(PJRT_Buffer_OnDeviceSizeInBytes_Args* args) {
  return fails("size") ? our_error() : cpu()->PJRT_Buffer_OnDeviceSizeInBytes(args);
}

void message(PJRT_Error_Message_Args* args) {
  if (!is_ours(args->error)) return cpu()->PJRT_Error_Message(args);
  args->message = "no memory in this test";
  args->message_size = std::strlen(args->message);
}

PJRT_Error* code(PJRT_Error_GetCode_Args* args) {
  if (!is_ours(args->error)) return cpu()->PJRT_Error_GetCode(args);
  args->code = PJRT_Error_Code_RESOURCE_EXHAUSTED;
  return nullptr;
}

void destroy(PJRT_Error_Destroy_Args* args) {
  if (!is_ours(args->error)) cpu()->PJRT_Error_Destroy(args);
}

}  // namespace

extern "C" void fail_after(const char* which, int passing, int count) {
  std::lock_guard lock(mutex);
  stage = which;
  passed = passing;
  failures = count;
}

extern "C" void fail(const char* which, int count) { fail_after(which, 0, count); }

extern "C" void fail_on(int device) {
  std::lock_guard lock(mutex);
  failing_device = device;
}

extern "C" size_t unfinished() {
  std::lock_guard lock(mutex);
  return ends.size();
}

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = *cpu();
  api.PJRT_Client_Compile = &compile;
  api.PJRT_Executable_DeserializeAndLoad = &load;
  api.PJRT_LoadedExecutable_Execute = &execute;
  api.PJRT_Buffer_OnDeviceSizeInBytes = &size;
  api.PJRT_Event_IsReady = &event_is_ready;
  api.PJRT_Event_Await = &event_await;
  api.PJRT_Event_OnReady = &event_on_ready;
  api.PJRT_Event_Destroy = &event_destroy;
  api.PJRT_Buffer_ReadyEvent = &ready_event;
  api.PJRT_Buffer_Destroy = &destroy_buffer;
  api.PJRT_Error_Message = &message;
  api.PJRT_Error_GetCode = &code;
  api.PJRT_Error_Destroy = &destroy;
  return &api;
}
