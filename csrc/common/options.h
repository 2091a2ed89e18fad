// The settings that C++ reads, as lazyxla/config.py last set them; that file documents each one.
// Plain atomics: a setting may change while other threads record.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <variant>

namespace lazyxla {

// Options of XLA's compiler by name, as its flags are called: {"xla_cpu_enable_fast_math", true}.
using CompileOptions = std::map<std::string, std::variant<bool, int64_t, double, std::string>>;

struct Options {
  std::atomic<bool> strict_fallback{false};
  std::atomic<bool> strict_host_calls{false};
  std::atomic<bool> check_indices{false};
  std::atomic<int64_t> max_pending_nodes{20000};
  std::atomic<int64_t> max_programs{2000};
  std::atomic<int64_t> max_calls{50000};
  std::atomic<bool> blocking{false};
  std::atomic<bool> cut_graphs{true};
  std::atomic<bool> host_programs{true};
};

inline Options& options() {
  static auto& instance = *new Options();  // threads may outlive static variables
  return instance;
}

}  // namespace lazyxla
