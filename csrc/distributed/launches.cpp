#include "distributed/launches.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "distributed/agreement.h"
#include "graph/partitioned_run.h"
#include "program/mesh_devices.h"
#include "program/variant.h"

namespace lazyxla::distributed {
namespace {

// What the processes of some ranks have launched together.
struct Launched {
  std::unique_ptr<Agreement> agreement;
  int64_t programs = 0;
};

class Checker {
 public:
  explicit Checker(Launches launches) : launches_(std::move(launches)) {}

  void check(const ir::Mesh& mesh, const graph::Variant& variant) {
    std::lock_guard lock(mutex_);
    Launched& launched = of(graph::own_devices(mesh).processes);
    const graph::Identity& identity = *variant.identity;
    const Call call{c10::str("program ", std::hex, identity.hash), ++launched.programs,
                    variant.line, identity.operators};
    launched.agreement->run(
        call, [&](int64_t) { return std::vector<int64_t>{identity_of(call)}; }, [] {});
  }

 private:
  Launched& of(const std::vector<int64_t>& ranks) {
    Launched& launched = launched_[ranks];
    if (!launched.agreement) {
      // Groups of the same processes have failures of their own.
      auto store = c10::make_intrusive<c10d::PrefixStore>(
          "lazyxla/launches/" + c10::Join(",", ranks), launches_.store);
      launched.agreement = std::make_unique<Agreement>(launches_.connect(ranks), std::move(store),
                                                       ranks, launches_.comparison, kPrograms);
    }
    return launched;
  }

  Launches launches_;
  std::mutex mutex_;  // guards what follows; held while waiting for the other processes
  std::map<std::vector<int64_t>, Launched> launched_;
};

}  // namespace

void compare_launches(Launches launches) {
  if (launches.comparison == Comparison::kNever) return;
  auto checker = std::make_shared<Checker>(std::move(launches));
  graph::set_launch_check([checker](const ir::Mesh& mesh, const graph::Variant& variant) {
    checker->check(mesh, variant);
  });
}

}  // namespace lazyxla::distributed
