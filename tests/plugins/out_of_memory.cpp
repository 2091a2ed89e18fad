// The CPU's plugin (PLUGIN), whose compiler has no memory three times: for
// tests/test_xla_options.py.
#include "cpu.h"

namespace {

char no_memory;
bool is_ours(const PJRT_Error* error) {
  return error == reinterpret_cast<const PJRT_Error*>(&no_memory);
}

PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  static int failures = 3;
  if (failures-- > 0) return reinterpret_cast<PJRT_Error*>(&no_memory);
  return cpu()->PJRT_Client_Compile(args);
}

void message(PJRT_Error_Message_Args* args) {
  if (!is_ours(args->error)) return cpu()->PJRT_Error_Message(args);
  args->message = "no memory";
  args->message_size = 9;
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

extern "C" const PJRT_Api* GetPjrtApi() {
  static PJRT_Api api = *cpu();
  api.PJRT_Client_Compile = &compile;
  api.PJRT_Error_Message = &message;
  api.PJRT_Error_GetCode = &code;
  api.PJRT_Error_Destroy = &destroy;
  return &api;
}
