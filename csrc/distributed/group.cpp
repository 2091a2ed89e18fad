#include "distributed/group.h"

#include <unordered_map>

#include "common/fork.h"

namespace lazyxla::distributed {
namespace {

using Groups = std::unordered_map<std::string, std::shared_ptr<Group>>;

auto& groups = *new Guarded<Groups>();

}  // namespace

void Group::note(int64_t turn, bool of_all, std::string description, std::string line) {
  const auto notes = notes_.hold();
  Call call{std::move(description), of_all ? ++notes->recorded : 0, std::move(line)};
  if (of_all) notes->identities[call.number] = identity_of(call);
  notes->by_turn[turn] = std::move(call);
}

Call Group::noted(int64_t turn) {
  const auto notes = notes_.hold();
  auto& [by_turn, identities, recorded] = *notes;
  const auto found = by_turn.find(turn);
  if (found == by_turn.end()) return {"a collective"};
  const Call call = found->second;
  const auto device = static_cast<c10::DeviceIndex>(turn / first_turn(1));
  by_turn.erase(by_turn.lower_bound(first_turn(device)), found);
  identities.erase(identities.begin(), identities.lower_bound(call.number));
  return call;
}

std::vector<int64_t> Group::recorded(int64_t number) {
  const auto notes = notes_.hold();
  std::vector<int64_t> found;
  const auto& identities = notes->identities;
  for (auto each = identities.lower_bound(number); each != identities.end(); ++each) {
    found.push_back(each->second);
  }
  return found;
}

void add_group(const std::string& name, std::shared_ptr<Group> group) {
  (*groups.hold())[name].swap(group);
}

void remove_group(const std::string& name) {
  if (forked()) return;  // the threads that its transport waits for are the parent's
  const auto removed = groups.hold()->extract(name);  // it may end without the lock
}

std::shared_ptr<Group> find_group(const std::string& name) {
  std::shared_ptr<Group> found;
  {
    const auto all = groups.hold();
    if (const auto each = all->find(name); each != all->end()) found = each->second;
  }
  TORCH_CHECK(found, "lazyxla: the process group ", name, " was destroyed before this was run");
  return found;
}

}  // namespace lazyxla::distributed
