#include "distributed/launches.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <map>
#include <memory>
#include <utility>

#include "common/locks.h"
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
  // Connects all processes at the start; subsets of them when they first launch something.
  Checker(Launches launches, const std::vector<int64_t>& ranks) : launches_(std::move(launches)) {
    launched_[ranks].agreement = meet(ranks);
  }

  void check(const ir::Mesh& mesh, const program::Variant& variant) {
    std::lock_guard lock(mutex_);
    const std::vector<int64_t>& ranks = program::own_devices(mesh).processes;
    Launched& launched = launched_[ranks];
    try {
      if (!launched.agreement) launched.agreement = meet(ranks);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "lazyxla: launching a program failed: some of the processes ",
                  c10::Join(", ", ranks),
                  " did not come to the first one that is for their devices",
                  variant.line.empty() ? "" : ", here at " + variant.line, ": ", error.what());
    }
    const program::Identity& identity = *variant.identity;
    const Call call{c10::str("program ", std::hex, identity.hash), ++launched.programs,
                    variant.line, identity.operators};
    launched.agreement->run(
        call, [&](int64_t) { return std::vector<int64_t>{identity_of(call)}; }, [] {});
  }

 private:
  std::unique_ptr<Agreement> meet(const std::vector<int64_t>& ranks) {
    // Groups of the same processes have separate failures.
    auto store = c10::make_intrusive<c10d::PrefixStore>("lazyxla/launches/" + c10::Join(",", ranks),
                                                        launches_.store);
    return std::make_unique<Agreement>(launches_.connect(ranks), std::move(store), ranks,
                                       launches_.comparison, kPrograms);
  }

  Launches launches_;
  OrderedMutex mutex_;  // guards what follows; held while waiting for the other processes
  std::map<std::vector<int64_t>, Launched> launched_;
};

}  // namespace

void compare_launches(Launches launches, const std::vector<int64_t>& ranks) {
  if (launches.comparison == Comparison::kNever) return;
  auto checker = std::make_shared<Checker>(std::move(launches), ranks);
  graph::set_launch_check([checker](const ir::Mesh& mesh, const program::Variant& variant) {
    checker->check(mesh, variant);
  });
}

}  // namespace lazyxla::distributed
