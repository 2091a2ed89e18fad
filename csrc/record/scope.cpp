#include "record/scope.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "common/user_line.h"
#include "program/program.h"
#include "record/recording.h"

namespace lazyxla::record {
namespace {

using at::impl::ThreadLocalPythonObjects;

std::atomic<Mode> process_mode{Mode::kLazy};
std::atomic<int> scopes_entered{0};  // and not left; most programs have none
thread_local std::shared_ptr<Scope> own_scope;

// The change that the thread has still to make; counted as a scope.
struct UnmadeChange {
  std::shared_ptr<ModeChange> change;
  ~UnmadeChange() {  // its thread ends, whose scopes have been left
    if (change) make(process_mode);
  }
  void make(std::atomic<Mode>& mode) {
    --scopes_entered;
    change->before = mode.exchange(change->mode);
    change.reset();
  }
};
thread_local UnmadeChange unmade;

const std::string& key() {
  static const auto* text = new std::string("lazyxla.scope");
  return *text;
}

// The scope that PyTorch carries with this thread's state.
std::shared_ptr<Scope> carried_scope() {
  if (!ThreadLocalPythonObjects::contains(key())) return nullptr;
  return std::static_pointer_cast<Scope>(ThreadLocalPythonObjects::get(key()));
}

void carry(std::shared_ptr<Scope> scope) {
  ThreadLocalPythonObjects::set(key(), std::move(scope));  // null too: older torch cannot erase
}

void make_change() {
  if (!unmade.change) return;
  const auto scope = own_scope ? own_scope : carried_scope();
  unmade.make(scope ? scope->mode : process_mode);
}

Scope* innermost() {
  if (scopes_entered.load(std::memory_order_relaxed) == 0) [[likely]]
    return nullptr;
  make_change();
  return own_scope ? own_scope.get() : carried_scope().get();
}

const char* describe(Cause cause) {
  switch (cause) {
    case Cause::kSync:
      return "lazyxla.sync() is called";
    case Cause::kRead:
      return "a value is read";
    case Cause::kLimit:
      return "more operators are recorded than LAZYXLA_MAX_PENDING allows";
    case Cause::kMode:
      return "the mode changes";
    case Cause::kRegionEnd:
      return "the region ends";
    case Cause::kApart:
      break;
  }
  return "";
}

// Counts a program in the regions of a scope and those around it.
std::string count_program(const std::string& reason, const Scope* innermost) {
  std::vector<Region*> regions;  // each once: a compiled function may call itself
  for (const Scope* scope = innermost; scope; scope = scope->outer.get()) {
    Region* region = scope->region.get();
    if (region && std::ranges::find(regions, region) == regions.end()) regions.push_back(region);
  }
  for (const Region* region : regions) {
    if (!region->max_programs || region->programs < *region->max_programs) continue;
    throw program::TooManyPrograms("lazyxla: the compiled region " + region->name +
                                   " needs another program than the " +
                                   std::to_string(region->programs) +
                                   " that it has, and max_graphs allows no more. Why: " + reason);
  }
  for (Region* region : regions) ++region->programs;
  return regions.empty() ? reason : regions.front()->name + ": " + reason;
}

}  // namespace

Mode current_mode() {
  const Scope* scope = innermost();
  return scope ? scope->mode.load() : process_mode.load(std::memory_order_relaxed);
}

std::shared_ptr<ModeChange> set_mode(Mode mode) {
  make_change();
  unmade.change = std::make_shared<ModeChange>(ModeChange{mode, {}});
  ++scopes_entered;
  return unmade.change;
}

void settle(const ModeChange& change) {
  if (unmade.change.get() == &change) make_change();
}

void confine(ModeChange& change) {
  if (unmade.change.get() == &change) {
    unmade.change.reset();
    --scopes_entered;
  } else if (change.before) {
    Scope* scope = innermost();
    (scope ? scope->mode : process_mode) = *change.before;
  }
}

bool in_region() {
  const Scope* scope = innermost();
  return scope && scope->region;
}

void enter_scope(Mode mode, std::shared_ptr<Region> region, bool outermost) {
  make_change();
  const bool nested = own_scope != nullptr;
  auto outer = nested ? own_scope : carried_scope();
  if (region) ++Recording::current().regions;
  own_scope = std::make_shared<Scope>(mode, std::move(region), std::move(outer), nested, outermost);
  carry(own_scope);
  ++scopes_entered;
}

void check_scope_is_own() {
  TORCH_CHECK(own_scope, "lazyxla: a block ends in another thread than it began in");
}

void leave_scope() {
  make_change();
  check_scope_is_own();
  const std::shared_ptr<Scope> scope = std::move(own_scope);
  if (scope->region) --Recording::current().regions;
  carry(scope->outer);
  own_scope = scope->nested ? scope->outer : nullptr;
  --scopes_entered;
}

const CompileOptions* region_options() {
  const Region* outermost = nullptr;
  for (const Scope* scope = innermost(); scope; scope = scope->outer.get()) {
    if (scope->region) outermost = scope->region.get();
  }
  return outermost ? &outermost->options : nullptr;
}

void check_unbroken(const std::string& what) {
  for (const Scope* scope = innermost(); scope; scope = scope->outer.get()) {
    if (!scope->region || !scope->region->full_graph) continue;
    TORCH_CHECK(false, "lazyxla: ", user_line_prefix(), "the compiled region ", scope->region->name,
                " has full_graph=True, but would break into two programs: ", what,
                " before it ends");
  }
}

void check_unbroken(Cause cause) {
  if (cause != Cause::kRegionEnd && cause != Cause::kApart) check_unbroken(describe(cause));
}

std::shared_ptr<Scope> current_scope() {
  if (scopes_entered.load(std::memory_order_relaxed) == 0) return nullptr;
  return own_scope ? own_scope : carried_scope();
}

std::function<std::string(const std::string& reason)> program_counter() {
  const auto scope = current_scope();
  if (!scope) return nullptr;
  return [scope](const std::string& reason) { return count_program(reason, scope.get()); };
}

}  // namespace lazyxla::record
