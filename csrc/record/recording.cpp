#include "record/recording.h"

#include <ATen/ThreadLocalPythonObjects.h>

#include <set>

#include "common/fork.h"
#include "common/gil.h"
#include "common/locks.h"

namespace torch::autograd {
TORCH_API int get_current_graph_task_id();  // -1 outside of a backward pass
}

namespace lazyxla::record {
namespace {

using at::impl::ThreadLocalPythonObjects;

const std::string& key() {
  static const auto* text = new std::string("lazyxla.recording");
  return *text;
}

thread_local std::shared_ptr<Recording> owner;

auto& recordings = *new Guarded<std::set<Recording*>>();

}  // namespace

Recording::Recording() : SafePyObject(nullptr, nullptr) {}

std::shared_ptr<Recording> Recording::make() {
  auto made = std::make_shared<Recording>();
  recordings.hold()->insert(made.get());  // not before it is shared: others ask for a reference
  return made;
}

Recording::~Recording() {
  if (own_ == this) own_ = nullptr;  // its thread ends
  if (forked()) return;              // a thread of the parent may have held any of the locks
  recordings.hold()->erase(this);
  hand_over();
  for (auto& set : sets_) delete set.load();
}

void Recording::hand_over() {
  for (auto& each : sets_) {
    ir::PendingSet* set = each.load();
    if (!set) continue;
    ir::PendingSet& heir = shared().pending(set->device);
    std::lock_guard lock(ir::device_mutex(set->device));
    heir.adopt_all(*set);
  }
}

Recording& Recording::find_current() {
  // On autograd's threads. The author's state is there as long as the pass.
  static thread_local int known_pass = -1;
  static thread_local Recording* known = nullptr;
  const int pass = torch::autograd::get_current_graph_task_id();
  if (pass != -1 && pass == known_pass) return *known;
  if (ThreadLocalPythonObjects::contains(key())) {
    known_pass = pass;
    known = static_cast<Recording*>(ThreadLocalPythonObjects::get(key()).get());
    return *known;
  }
  if (pass != -1) return shared();  // of a thread that has recorded nothing itself
  owner = make();
  // After Thread.join() the thread's work must be found; its C++ end alone may come later.
  at_python_threads_end([recording = owner] {
    if (!forked()) recording->hand_over();
  });
  ThreadLocalPythonObjects::set(key(), owner);
  own_ = owner.get();
  return *own_;
}

Recording& Recording::shared() {
  static auto* instance = new std::shared_ptr<Recording>(make());
  return **instance;
}

std::vector<std::shared_ptr<Recording>> Recording::all() {
  std::vector<std::shared_ptr<Recording>> found;
  const auto all = recordings.hold();
  for (Recording* each : *all) {
    if (auto alive = each->weak_from_this().lock()) found.push_back(std::move(alive));
  }
  return found;
}

void take_over_from(ir::PendingSet& theirs, ir::Storage& storage, ir::PendingSet& mine) {
  if (theirs.regions != 0) {
    TORCH_CHECK(!theirs.has_collectives,
                "lazyxla: another thread is recording this tensor, in a compiled region that calls "
                "collectives: it can be used once the region has ended");
  } else if (theirs.has_collectives) {
    mine.adopt_all(theirs);
  } else {
    mine.adopt(storage);
  }
}

ir::PendingSet& Recording::make_set(std::atomic<ir::PendingSet*>& set, c10::DeviceIndex device) {
  auto fresh = std::make_unique<ir::PendingSet>(device, regions);
  ir::PendingSet* none = nullptr;
  if (set.compare_exchange_strong(none, fresh.get())) return *fresh.release();
  return *none;
}

}  // namespace lazyxla::record
