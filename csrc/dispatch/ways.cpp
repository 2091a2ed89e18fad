#include "dispatch/ways.h"

#include <map>
#include <mutex>
#include <utility>

namespace lazyxla::dispatch {
namespace {

// What Python was asked to answer; set once.
struct Hooks {
  std::function<std::string(const std::string&)> how;
  TryOut try_out;
};

Hooks& hooks() {
  static auto* instance = new Hooks();
  return *instance;
}

Way ask_way(const OpInfo& info) {
  const std::string how = hooks().how(info.functional_name);
  return how == "host"            ? Way::kHost
         : how == "call"          ? Way::kHostCall
         : how == "decomposition" ? Way::kTryOut
                                  : Way::kRule;
}

// The ways of operators on platforms that programs are only captured for.
class CapturedWays {
 public:
  static CapturedWays& get() {
    static auto* instance = new CapturedWays();
    return *instance;
  }

  Way of(const OpInfo& info, const std::string& platform) {
    const std::pair key{platform, info.functional_name};
    {
      std::lock_guard lock(mutex_);
      auto found = ways_.find(key);
      if (found != ways_.end()) return found->second;
    }
    Way way = ask_way(info);  // takes the GIL: not under the mutex
    std::lock_guard lock(mutex_);
    return ways_.emplace(key, way).first->second;
  }

  void forget() {
    std::lock_guard lock(mutex_);
    ways_.clear();
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, Way> ways_;
};

}  // namespace

Way way_of(const OpInfo& info, const graph::Capture* capture) {
  if (capture) return CapturedWays::get().of(info, capture->platform());
  Way way = info.way.load(std::memory_order_acquire);
  if (way != Way::kUnknown) return way;
  way = ask_way(info);
  info.way.store(way, std::memory_order_release);
  return way;
}

ir::Recipe::Runs try_out(const ir::OpSpec& spec, const Scan& scan) {
  return hooks().try_out(spec, scan);
}

void set_lowering(std::function<std::string(const std::string&)> how, TryOut try_out) {
  hooks() = {std::move(how), std::move(try_out)};
}

void forget_way(const std::string& name) {
  OpInfo::forget_way(name);
  CapturedWays::get().forget();
}

}  // namespace lazyxla::dispatch
