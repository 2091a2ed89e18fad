#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>

#include "common/locks.h"
#include "pjrt/executable.h"
#include "program/graph.h"
#include "program/replicas.h"

namespace lazyxla::program {
namespace {

// All sets of options that were ever in force, by their numbers; number 0 is the empty one.
Guarded<std::deque<CompileOptions>>& option_sets() {
  using Sets = std::deque<CompileOptions>;  // elements never move
  static auto* instance = new Guarded<Sets>(Sets(1));
  return *instance;
}

}  // namespace

uint64_t number_options(const CompileOptions& options) {
  const auto sets = option_sets().hold();
  const auto found = std::find(sets->begin(), sets->end(), options);
  const uint64_t number = found - sets->begin();
  if (found == sets->end()) sets->push_back(options);
  return number;
}

const CompileOptions& options_of(uint64_t number) { return (*option_sets().hold())[number]; }

CompileOptions compile_options(const Graph& graph) {
  CompileOptions options;
  for (const ir::NodePtr& node : graph.nodes) {
    for (const auto& [name, value] : node->spec()->compile_options) {
      TORCH_CHECK_VALUE(options.emplace(name, value).first->second == value,
                        "lazyxla: functions compiled with different values of the option ", name,
                        " are part of one program; call lazyxla.sync() between them");
    }
  }
  const CompileOptions& others = options_of(graph.key[0]);
  options.insert(others.begin(), others.end());
  if (graph.partition) options[pjrt::kDevices] = graph.partition->devices();
  if (graph.replicas) options[pjrt::kReplicas] = graph.replicas->devices_text();
  return options;
}

}  // namespace lazyxla::program
