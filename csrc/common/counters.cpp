#include "common/counters.h"

#include <utility>

namespace lazyxla {
namespace {

using Entry = std::pair<const char*, std::atomic<int64_t> Counters::*>;

constexpr Entry kEntries[] = {
    {"data_dependent", &Counters::data_dependent},
    {"nodes_recorded", &Counters::nodes_recorded},
    {"shape_inferences", &Counters::shape_inferences},
    {"flushes", &Counters::flushes},
    {"cache_hits", &Counters::cache_hits},
    {"lowerings", &Counters::lowerings},
    {"compiles", &Counters::compiles},
    {"graphs_cut", &Counters::graphs_cut},
    {"host_programs", &Counters::host_programs},
    {"programs_loaded", &Counters::programs_loaded},
    {"programs_dropped", &Counters::programs_dropped},
    {"executions", &Counters::executions},
    {"uploads", &Counters::uploads},
    {"downloads", &Counters::downloads},
    {"loader_waits", &Counters::loader_waits},
    {"fallbacks", &Counters::fallbacks},
    {"host_calls", &Counters::host_calls},
    {"kernel_calls", &Counters::kernel_calls},
    {"nodes_lowered", &Counters::nodes_lowered},
    {"comparisons", &Counters::comparisons},
    {"captured_steps", &Counters::captured_steps},
};

}  // namespace

constinit Counters Counters::instance_;

void Counters::count_fallback(const std::string& op) {
  ++fallbacks;
  const auto by_operator = by_operator_.hold();
  if (!*by_operator) *by_operator = std::make_unique<std::map<std::string, int64_t>>();
  ++(**by_operator)[op];
}

std::map<std::string, int64_t> Counters::fallbacks_by_operator() {
  const auto by_operator = by_operator_.hold();
  return *by_operator ? **by_operator : std::map<std::string, int64_t>();
}

std::map<std::string, int64_t> Counters::snapshot() {
  std::map<std::string, int64_t> result;
  for (auto [name, member] : kEntries) result[name] = this->*member;
  return result;
}

void Counters::reset() {
  for (auto [name, member] : kEntries) this->*member = 0;
  by_operator_.hold()->reset();
}

}  // namespace lazyxla
