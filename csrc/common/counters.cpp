#include "common/counters.h"

namespace lazyxla {

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
#define LAZYXLA_READ(name, what) result[#name] = name;
  LAZYXLA_COUNTERS(LAZYXLA_READ)
#undef LAZYXLA_READ
  return result;
}

void Counters::reset() {
#define LAZYXLA_RESET(name, what) name = 0;
  LAZYXLA_COUNTERS(LAZYXLA_RESET)
#undef LAZYXLA_RESET
  by_operator_.hold()->reset();
}

}  // namespace lazyxla
