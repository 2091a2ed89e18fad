#include "graph/history.h"

#include <algorithm>
#include <deque>
#include <mutex>
#include <sstream>
#include <tuple>

namespace lazyxla::graph {
namespace {

constexpr size_t kRemembered = 32;

// A graph without its values. Specs are only compared: they may be gone.
struct Outline {
  explicit Outline(const Graph& graph) : outputs(graph.outputs), aliases(graph.aliases) {
    for (const ir::NodePtr& node : graph.nodes) {
      names.push_back(node->spec()->name);
      specs.push_back(node->spec()->id);
    }
    for (const ir::NodePtr& leaf : graph.leaves) inputs.push_back(leaf->output_type(0));
  }

  std::vector<std::string> names;  // of the operators
  std::vector<uint64_t> specs;
  std::vector<ir::TensorType> inputs;
  std::vector<uint32_t> outputs;
  std::vector<int> aliases;
};

size_t common_operators(const Outline& a, const Outline& b) {
  return std::mismatch(a.names.begin(), a.names.end(), b.names.begin(), b.names.end()).first -
         a.names.begin();
}

std::string text_of(const ir::TensorType& type) {
  std::ostringstream text;
  text << type.dtype << c10::IntArrayRef(type.dims);
  return text.str();
}

// What differs between two graphs of the same operators.
std::string difference(const Outline& now, const Outline& before) {
  size_t inputs = std::min(now.inputs.size(), before.inputs.size());
  for (size_t i = 0; i < inputs; ++i) {
    if (now.inputs[i] == before.inputs[i]) continue;
    return "input " + std::to_string(i) + " is " + text_of(now.inputs[i]) + ", not " +
           text_of(before.inputs[i]);
  }
  for (size_t i = 0; i < now.specs.size(); ++i) {
    if (now.specs[i] == before.specs[i]) continue;
    return "operator " + std::to_string(i) + ", " + now.names[i] + ", has other arguments";
  }
  if (now.inputs.size() != before.inputs.size()) return "other tensors are the same";
  if (now.outputs != before.outputs) {
    return std::to_string(now.outputs.size()) + " results are alive at its end, not " +
           std::to_string(before.outputs.size()) + " or not the same";
  }
  if (now.aliases != before.aliases) return "other tensors are written in place";
  return "operators take each other's results differently";
}

class History {
 public:
  static History& get() {
    static auto* instance = new History();
    return *instance;
  }

  std::string explain(const Graph& graph) {
    Outline now(graph);
    std::lock_guard lock(mutex_);
    const Outline* like = nullptr;
    std::tuple<bool, bool, bool, size_t> most{};
    for (const Outline& before : outlines_) {  // the newest first
      size_t common = common_operators(now, before);
      bool same = is_same(now, before, common);
      std::tuple likeness{same, same && now.specs == before.specs, now.inputs == before.inputs,
                          common};
      if (likeness <= most || common * 2 < now.names.size()) continue;
      like = &before;
      most = likeness;
    }
    std::string text = like ? compare(now, *like) : "";
    outlines_.push_front(std::move(now));
    if (outlines_.size() > kRemembered) outlines_.pop_back();
    return text;
  }

 private:
  static bool is_same(const Outline& now, const Outline& before, size_t common) {
    return common == now.names.size() && common == before.names.size();
  }

  static std::string compare(const Outline& now, const Outline& before) {
    size_t common = common_operators(now, before);
    if (is_same(now, before, common)) {
      return ": like one before, but " + difference(now, before);
    }
    std::string text = ": like one before up to operator " + std::to_string(common);
    if (common == now.names.size()) return text + ", where it ends";
    text += ", " + now.names[common];
    if (common < before.names.size()) text += ", which was " + before.names[common];
    return text;
  }

  std::mutex mutex_;
  std::deque<Outline> outlines_;
};

}  // namespace

std::string explain_new(const Graph& graph) {
  return "a new graph" + History::get().explain(graph);
}

}  // namespace lazyxla::graph
