#include "distributed/collective_launches.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>

#include "dispatch/host_program.h"
#include "distributed/group.h"
#include "program/replicas.h"

namespace lazyxla::distributed {
namespace {

// Messages are sent before, and received after, what their other end does meanwhile: in programs
// that all run in their order, two processes that both send first would wait for each other.
constexpr std::array<std::string_view, 3> kMessages{
    "lazyxla_c10d::send", "lazyxla_c10d::start_receive", "lazyxla_c10d::finish_receive"};

// An exchange of rows that only some processes know to be even is the host's, for all of them.
bool is_by_host(const ir::OpSpec& spec) {
  if (std::find(kMessages.begin(), kMessages.end(), spec.name) != kMessages.end()) return true;
  return spec.name == "lazyxla_c10d::all_to_all" && !spec.args.at(4).constant.toBool();
}

graph::Replicas replicas_of(const ir::OpSpec& spec) {
  const std::string& group = spec.args.at(1).constant.toStringRef();
  return {.group = group,
          .devices = graph::devices_of_ranks(find_group(group)->ranks()),
          .by_host = is_by_host(spec)};
}

bool can_agree(const graph::Replicas& replicas) { return find_group(replicas.group)->compares(); }

graph::Launched launch_together(const graph::Replicas& replicas, int64_t turn,
                                const graph::Identity* whole, c10::function_ref<void()> launch) {
  const std::shared_ptr<Group> group = find_group(replicas.group);
  const Call call = group->noted(turn);
  const auto recorded = [&](int64_t number) { return group->recorded(number); };
  Whole compared;
  if (whole) compared = {whole->hash, whole->without_numbers, replicas.calls};
  return group->agreement().launch(call, recorded, compared, launch);
}

}  // namespace

void install_collective_launches() {
  graph::set_collectives(
      {&replicas_of, &can_agree, &dispatch::host_program_of_call, &launch_together});
}

}  // namespace lazyxla::distributed
