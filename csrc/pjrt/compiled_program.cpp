#include "pjrt/compiled_program.h"

#include "common/fork.h"
#include "pjrt/call.h"
#include "pjrt/error.h"

namespace lazyxla::pjrt {

PJRT_Program to_program(std::string_view code, std::string_view format) {
  PJRT_Program program{};
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  program.code = const_cast<char*>(code.data());  // in/out in other functions, only read here
  program.code_size = code.size();
  program.format = format.data();
  program.format_size = format.size();
  return program;
}

CompiledProgram::~CompiledProgram() {
  if (forked()) {
    return;
  }
  LAZYXLA_PJRT_ARGS(args, PJRT_Executable_Destroy, executable, raw_);
  ignore_error(api_, api_->PJRT_Executable_Destroy(&args));
}

size_t CompiledProgram::num_outputs() const {
  check_not_forked();
  LAZYXLA_PJRT_QUERY(args, api_, PJRT_Executable_NumOutputs, executable, raw_);
  return args.num_outputs;
}

std::string CompiledProgram::serialize() const {
  check_not_forked();
  LAZYXLA_PJRT_QUERY(args, api_, PJRT_Executable_Serialize, executable, raw_);
  std::string bytes(args.serialized_bytes, args.serialized_bytes_size);
  args.serialized_executable_deleter(args.serialized_executable);
  return bytes;
}

CompiledProgram::Optimized CompiledProgram::optimized_program() const {
  check_not_forked();
  PJRT_Program program{};
  program.struct_size = PJRT_Program_STRUCT_SIZE;
  LAZYXLA_PJRT_ARGS(args, PJRT_Executable_OptimizedProgram, executable, raw_);
  args.program = &program;
  LAZYXLA_PJRT_CALL(api_, PJRT_Executable_OptimizedProgram, args);  // returns the size
  Optimized result{.format = std::string(program.format, program.format_size),
                   .bytes = std::string(program.code_size, '\0')};
  program.code = result.bytes.data();
  LAZYXLA_PJRT_CALL(api_, PJRT_Executable_OptimizedProgram, args);
  return result;
}

std::map<std::string, int64_t> CompiledProgram::memory_stats() const {
  check_not_forked();
  if (!has(*api_, &PJRT_Api::PJRT_Executable_GetCompiledMemoryStats)) return {};
  LAZYXLA_PJRT_ARGS(args, PJRT_Executable_GetCompiledMemoryStats, executable, raw_);
  if (ignore_error(api_, api_->PJRT_Executable_GetCompiledMemoryStats(&args))) return {};
  return {{"generated_code", args.generated_code_size_in_bytes},
          {"arguments", args.argument_size_in_bytes},
          {"outputs", args.output_size_in_bytes},
          {"aliased", args.alias_size_in_bytes},
          {"temporary", args.temp_size_in_bytes},
          {"peak", args.peak_memory_in_bytes}};
}

NamedValues CompiledProgram::cost_analysis() const {
  check_not_forked();
  LAZYXLA_PJRT_ARGS(args, PJRT_Executable_GetCostAnalysis, executable, raw_);
  if (ignore_error(api_, api_->PJRT_Executable_GetCostAnalysis(&args))) {
    return {};
  }
  return read_named_values(args.properties, args.num_properties);
}

}  // namespace lazyxla::pjrt
