#include "dispatch/lowering_kind.h"

#include <map>
#include <utility>

#include "common/locks.h"

namespace lazyxla::dispatch {
namespace {

// Python's answers; set once.
struct Hooks {
  std::function<std::string(const std::string&)> how;
  CheckLowering check_lowering;
};

Hooks& hooks() {
  static auto* instance = new Hooks();
  return *instance;
}

LoweringKind ask_lowering_kind(const OpInfo& info) {
  const std::string how = hooks().how(info.functional_name);
  return how == "host"            ? LoweringKind::kHost
         : how == "call"          ? LoweringKind::kHostCall
         : how == "decomposition" ? LoweringKind::kDecomposition
                                  : LoweringKind::kRule;
}

// The lowering kinds of operators on platforms that programs are only captured for.
using Kinds = std::map<std::pair<std::string, std::string>, LoweringKind>;

Guarded<Kinds>& captured_kinds() {
  static auto* instance = new Guarded<Kinds>();
  return *instance;
}

LoweringKind captured_kind(const OpInfo& info, const std::string& platform) {
  const std::pair key{platform, info.functional_name};
  {
    const auto kinds = captured_kinds().hold();
    auto found = kinds->find(key);
    if (found != kinds->end()) return found->second;
  }
  LoweringKind kind = ask_lowering_kind(info);  // takes the GIL
  return captured_kinds().hold()->emplace(key, kind).first->second;
}

}  // namespace

LoweringKind lowering_kind_of(const OpInfo& info, const record::Capture* capture) {
  if (capture) return captured_kind(info, capture->platform());
  LoweringKind kind = info.lowering_kind.load(std::memory_order_acquire);
  if (kind != LoweringKind::kUnknown) return kind;
  kind = ask_lowering_kind(info);
  info.lowering_kind.store(kind, std::memory_order_release);
  return kind;
}

Recipe::Runs check_lowering(const ir::OpSpec& spec, const Scan& scan) {
  return hooks().check_lowering(spec, scan);
}

void set_lowering(std::function<std::string(const std::string&)> how,
                  CheckLowering check_lowering) {
  hooks() = {std::move(how), std::move(check_lowering)};
}

void forget_lowering_kind(const std::string& name) {
  OpInfo::forget_lowering_kind(name);
  captured_kinds().hold()->clear();
}

}  // namespace lazyxla::dispatch
