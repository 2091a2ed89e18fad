#include "distributed/group.h"

#include <unordered_map>

namespace lazyxla::distributed {
namespace {

struct Groups {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<Group>> by_name;

  static Groups& get() {
    static auto* instance = new Groups();
    return *instance;
  }
};

}  // namespace

void Group::note(int64_t turn, bool of_all, std::string line) {
  std::lock_guard lock(mutex_);
  noted_[turn] = Call{"", of_all ? ++recorded_ : 0, std::move(line)};
}

Call Group::noted(int64_t turn) {
  std::lock_guard lock(mutex_);
  const auto found = noted_.find(turn);
  if (found == noted_.end()) return {};
  Call call = std::move(found->second);
  const auto device = static_cast<c10::DeviceIndex>(turn / first_turn(1));
  noted_.erase(noted_.lower_bound(first_turn(device)), std::next(found));
  return call;
}

void Group::keep_sent(Transfer transfer) {
  std::lock_guard lock(mutex_);
  while (!sent_.empty() && sent_.front().work->isCompleted()) sent_.pop_front();
  sent_.push_back(std::move(transfer));
}

void Group::finish_sends() {
  std::lock_guard lock(mutex_);
  for (const Transfer& transfer : sent_) transfer.work->wait();
  sent_.clear();
}

void Group::keep_started(int64_t peer, int64_t tag, Transfer transfer) {
  std::lock_guard lock(mutex_);
  started_[{peer, tag}].push_back(std::move(transfer));
}

Transfer Group::take_started(int64_t peer, int64_t tag) {
  std::lock_guard lock(mutex_);
  auto& queue = started_[{peer, tag}];
  TORCH_CHECK(!queue.empty(), "lazyxla: nothing was to be received from process ", peer);
  Transfer transfer = std::move(queue.front());
  queue.pop_front();
  return transfer;
}

void add_group(const std::string& name, std::shared_ptr<Group> group) {
  Groups& groups = Groups::get();
  std::lock_guard lock(groups.mutex);
  groups.by_name[name] = std::move(group);
}

void remove_group(const std::string& name) {
  Groups& groups = Groups::get();
  std::lock_guard lock(groups.mutex);
  groups.by_name.erase(name);
}

std::shared_ptr<Group> find_group(const std::string& name) {
  Groups& groups = Groups::get();
  std::lock_guard lock(groups.mutex);
  const auto found = groups.by_name.find(name);
  TORCH_CHECK(found != groups.by_name.end(), "lazyxla: the process group ", name,
              " was destroyed before this was run");
  return found->second;
}

}  // namespace lazyxla::distributed
