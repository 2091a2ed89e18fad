// A compiled program: the compiler's output, and what it reports about it.
//
// It cannot run: it may be for devices that do not exist here (topology.h). One that is loaded onto
// devices of a client is an Executable, which has a CompiledProgram for the queries below.
#pragma once

#include <pjrt_c_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "pjrt/plugin.h"

namespace lazyxla::pjrt {

// A program as the compile functions take it. It points into `code` and `format`.
PJRT_Program to_program(std::string_view code, std::string_view format);

// A program that returns its input, as MLIR: what options are tried with.
inline constexpr std::string_view kSmallestProgram =
    "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }";

class CompiledProgram {
 public:
  // Takes ownership of `raw`.
  CompiledProgram(const PJRT_Api& api, PJRT_Executable* raw) : api_(&api), raw_(raw) {}
  ~CompiledProgram();
  CompiledProgram(const CompiledProgram&) = delete;
  CompiledProgram& operator=(const CompiledProgram&) = delete;

  size_t num_outputs() const;

  // Bytes for Client::deserialize. Throws if the plugin cannot serialize.
  std::string serialize() const;

  // The optimized program, and its format, for example "hlo_with_config".
  struct Optimized {
    std::string format;
    std::string bytes;
  };
  Optimized optimized_program() const;

  // What the compiler knows about its memory, in bytes: "generated_code", "arguments", "outputs",
  // "aliased" (how much of the arguments is reused for outputs), "temporary" (needed during the
  // execution only) and "peak" (0 if the plugin does not report it). Empty if not offered.
  std::map<std::string, int64_t> memory_stats() const;

  // The compiler's estimates, for example "flops" and "bytes accessed". Empty if not offered.
  NamedValues cost_analysis() const;

 private:
  const PJRT_Api* api_;
  PJRT_Executable* raw_;
};

}  // namespace lazyxla::pjrt
