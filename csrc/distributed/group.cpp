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

void Group::note(int64_t turn, bool of_all, std::string description, std::string line) {
  std::lock_guard lock(mutex_);
  Call call{std::move(description), of_all ? ++recorded_ : 0, std::move(line)};
  if (of_all) identities_[call.number] = identity_of(call);
  noted_[turn] = std::move(call);
}

Call Group::noted(int64_t turn) {
  std::lock_guard lock(mutex_);
  const auto found = noted_.find(turn);
  if (found == noted_.end()) return {"a collective"};
  const Call call = found->second;
  const auto device = static_cast<c10::DeviceIndex>(turn / first_turn(1));
  noted_.erase(noted_.lower_bound(first_turn(device)), found);
  identities_.erase(identities_.begin(), identities_.lower_bound(call.number));
  return call;
}

std::vector<int64_t> Group::recorded(int64_t number) {
  std::lock_guard lock(mutex_);
  std::vector<int64_t> found;
  for (auto each = identities_.lower_bound(number); each != identities_.end(); ++each) {
    found.push_back(each->second);
  }
  return found;
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
