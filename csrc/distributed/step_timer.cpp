// What DistributedDataParallel takes the times of its steps with: it has none for a device without
// such a class, and warns of that in each training.
//
// A step's forward, backward and collectives are recorded, and run later as one program, so that
// the host's clock says nothing about any of them: no time is reported, and DDP's logging data
// keep 0.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace lazyxla::distributed {
namespace {

class StepTimer : public c10d::Timer {
 public:
  explicit StepTimer(c10::Device /*device*/) {}
  std::optional<int64_t> measureDifference(Event /*start*/, Event /*end*/) override {
    return std::nullopt;
  }
};

}  // namespace
}  // namespace lazyxla::distributed

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kPrivateUse1, lazyxla::distributed::StepTimer);

}  // namespace c10d
