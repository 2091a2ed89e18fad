// Launches of programs that the processes of a group run together (program/replicas.h).
//
// A launched collective waits on the device for the others, for ever if they launch something else.
// So the processes check before that all are in the same call, as on the CPU (agreement.h); one
// that learns that they are not launches nothing.

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch/host_program.h"
#include "distributed/collectives.h"
#include "distributed/group.h"
#include "program/replicas.h"

namespace lazyxla::distributed {
namespace {

// A send does not wait for the receiver. As programs, which run in order, two processes that both
// send first would wait for each other.
constexpr std::array<std::string_view, 3> kMessages{
    "lazyxla_c10d::send", "lazyxla_c10d::start_receive", "lazyxla_c10d::finish_receive"};

// An exchange of rows that only some processes know to be even is the host's, for all of them.
bool is_by_host(const ir::OpSpec& spec) {
  if (std::find(kMessages.begin(), kMessages.end(), spec.name) != kMessages.end()) return true;
  return spec.name == "lazyxla_c10d::all_to_all" && !spec.args.at(4).constant.toBool();
}

program::Collectives::Caller caller_of(const ir::OpSpec& spec) {
  const std::string& name = spec.args.at(1).constant.toStringRef();
  const auto group = find_group(name);
  return {name, group->ranks(), is_by_host(spec), group->compares()};
}

// The group's first call in a program that begins at this turn, and the group.
struct First {
  First(const program::Replicas::Group& of, int64_t turn)
      : group(find_group(of.name)), call(group->noted(turn + of.first)), calls(of.calls) {}

  std::shared_ptr<Group> group;
  Call call;
  int64_t calls;
  std::vector<int64_t> recorded(int64_t number) const { return group->recorded(number); }
};

std::vector<First> groups_of(const program::Replicas& replicas, int64_t turn) {
  std::vector<First> groups;
  for (const program::Replicas::Group& group : replicas.groups) groups.emplace_back(group, turn);
  return groups;
}

// Group after group, as long as all members may be about to launch the program. Where the groups
// are rows of a grid, all processes reach the same result: what the first group compares says
// whether each of them can be asked at all. How far the members of a row have agreed is known in
// this row alone.
program::Launched agree(const std::vector<First>& groups, const program::Identity& whole,
                        bool has_parts) {
  const bool can_be_asked = std::none_of(groups.begin(), groups.end(), [](const First& first) {
    return first.group->agreement().is_agreed_on(first.call);
  });
  program::Launched found = program::Launched::kYes;
  for (const First& first : groups) {
    Whole offered{.calls = first.calls, .has_parts = has_parts};
    if (can_be_asked) {
      offered.hash = found == program::Launched::kYes ? whole.hash : 0;
      offered.without_numbers = whole.without_numbers;
    }
    const program::Launched here = first.group->agreement().agree(
        first.call, [&](int64_t number) { return first.recorded(number); }, offered);
    if (here != program::Launched::kYes) found = here;
    if (here == program::Launched::kNo) break;
  }
  if (found == program::Launched::kYes) return found;
  for (const First& first : groups) first.group->agreement().agree_anew(first.call, found);
  return found;
}

program::Launched launch_together(const program::Replicas& replicas, int64_t turn,
                                  const program::Identity* whole, bool has_parts,
                                  c10::function_ref<void()> launch) {
  const std::vector<First> groups = groups_of(replicas, turn);
  if (!whole) {
    const First& only = groups.front();
    only.group->agreement().run(
        only.call, [&](int64_t number) { return only.recorded(number); }, launch,
        /*compare_all=*/true);
    return program::Launched::kYes;
  }
  const program::Launched found = agree(groups, *whole, has_parts);
  if (found != program::Launched::kYes) return found;
  for (const First& first : groups) {
    const bool is_last = &first == &groups.back();
    first.group->agreement().launch_whole(first.call, {.calls = first.calls}, [&] {
      if (is_last) launch();
    });
  }
  return program::Launched::kYes;
}

// In the order in which the others come to them.
void give_up(const program::Replicas& replicas, int64_t turn, const std::string& reason) {
  for (const First& first : groups_of(replicas, turn)) {
    first.group->agreement().give_up(first.call, reason);
  }
}

}  // namespace

void install_collective_launches() {
  program::set_collectives(
      {&caller_of, &dispatch::host_program_of_call, &launch_together, &give_up});
}

}  // namespace lazyxla::distributed
