#include "dispatch/lowering_kind.h"

#include <utility>

namespace lazyxla::dispatch {
namespace {

// Python's answers; set once.
struct Hooks {
  std::function<std::string(const std::string&)> how;
  CheckLowering check_lowering;
};

auto& hooks = *new Hooks();

LoweringKind ask_lowering_kind(const OpInfo& info) {
  const std::string how = hooks.how(info.functional_name);
  return how == "host"            ? LoweringKind::kHost
         : how == "call"          ? LoweringKind::kHostCall
         : how == "decomposition" ? LoweringKind::kDecomposition
                                  : LoweringKind::kRule;
}

}  // namespace

LoweringKind lowering_kind_of(const OpInfo& info, const record::Capture* capture) {
  if (capture) return ask_lowering_kind(info);  // its platform may be another one
  LoweringKind kind = info.lowering_kind.load(std::memory_order_acquire);
  if (kind != LoweringKind::kUnknown) return kind;
  kind = ask_lowering_kind(info);
  info.lowering_kind.store(kind, std::memory_order_release);
  return kind;
}

Recipe::Runs check_lowering(const ir::OpSpec& spec, const Scan& scan) {
  return hooks.check_lowering(spec, scan);
}

void set_lowering(std::function<std::string(const std::string&)> how,
                  CheckLowering check_lowering) {
  hooks = {std::move(how), std::move(check_lowering)};
}

}  // namespace lazyxla::dispatch
