#include "program/compile_options.h"

#include <c10/util/Exception.h>

#include <deque>
#include <mutex>

#include "pjrt/executable.h"
#include "program/replicas.h"

namespace lazyxla::program {
namespace {

// All sets of options that were ever in force, by their numbers; number 0 is the empty one.
class OptionSets {
 public:
  static OptionSets& get() {
    static auto* instance = new OptionSets();
    return *instance;
  }

  uint64_t number(const CompileOptions& options) {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < sets_.size(); ++i) {
      if (sets_[i] == options) return i;
    }
    sets_.push_back(options);
    return sets_.size() - 1;
  }

  const CompileOptions& operator[](uint64_t number) {
    std::lock_guard lock(mutex_);
    return sets_[number];
  }

 private:
  std::mutex mutex_;
  std::deque<CompileOptions> sets_{{}};  // elements never move
};

}  // namespace

uint64_t number_options(const CompileOptions& options) { return OptionSets::get().number(options); }

const CompileOptions& options_of(uint64_t number) { return OptionSets::get()[number]; }

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
