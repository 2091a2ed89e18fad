#include "program/compile_history.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <sstream>
#include <tuple>
#include <unordered_set>

namespace lazyxla::graph {
namespace {

// Alignment: which operators of one graph correspond to those of another. The shortest edit script
// from one list to the other, by Myers' greedy algorithm ("An O(ND) Difference Algorithm and Its
// Variations", 1986).
struct Alignment {
  std::vector<int32_t> places;  // per element of `now`, its index in `before`, or -1
  size_t edits;                 // elements that only one of both has
};

// How far in `now` a number of edits leads. The index in `now` less that in `before` is the
// diagonal.
class Reached {
 public:
  Reached(int64_t n, int64_t m) : n_(n), m_(m) {}

  struct Step {
    int64_t place;        // in `now`, after the edit; kNowhere if there is none
    bool drops_from_now;  // or else from `before`
  };
  static constexpr int64_t kNowhere = -1;

  // The last of `edits` edits that ends on this diagonal.
  Step step(int64_t edits, int64_t diagonal) const {
    if (edits == 0) return {0, false};
    int64_t across = at(edits - 1, diagonal - 1), down = at(edits - 1, diagonal + 1);
    across = across == kNowhere || across == n_ ? kNowhere : across + 1;
    if (down != kNowhere && down - diagonal > m_) down = kNowhere;
    return across > down ? Step{across, true} : Step{down, false};
  }

  int64_t at(int64_t edits, int64_t diagonal) const {
    return std::abs(diagonal) > edits ? kNowhere : places_[edits][diagonal + edits];
  }

  void begin_row(int64_t edits) { places_.emplace_back(2 * edits + 1, kNowhere); }
  void set(int64_t diagonal, int64_t place) {
    places_.back()[diagonal + static_cast<int64_t>(places_.size()) - 1] = place;
  }

 private:
  const int64_t n_, m_;
  std::vector<std::vector<int64_t>> places_;  // per number of edits and diagonal
};

// Nothing if it takes more than `most` edits. Time and memory grow with edits * (size + edits).
std::optional<Alignment> align(c10::ArrayRef<uint64_t> now, c10::ArrayRef<uint64_t> before,
                               size_t most) {
  const auto n = static_cast<int64_t>(now.size()), m = static_cast<int64_t>(before.size());
  const auto bound = static_cast<int64_t>(std::min<size_t>(most, n + m));
  if (std::abs(n - m) > bound) return std::nullopt;
  Reached reached(n, m);
  int64_t edits = 0;
  for (; edits <= bound && reached.at(edits - 1, n - m) != n; ++edits) {
    reached.begin_row(edits);
    for (int64_t diagonal = -edits; diagonal <= edits; diagonal += 2) {
      int64_t place = reached.step(edits, diagonal).place;
      if (place == Reached::kNowhere) continue;
      while (place < n && place - diagonal < m && now[place] == before[place - diagonal]) ++place;
      reached.set(diagonal, place);
    }
  }
  if (reached.at(--edits, n - m) != n) return std::nullopt;
  Alignment found{std::vector<int32_t>(n, -1), static_cast<size_t>(edits)};
  for (int64_t place = n, diagonal = n - m; edits >= 0; --edits) {
    const Reached::Step step = reached.step(edits, diagonal);
    for (; place > step.place; --place) {
      found.places[place - 1] = static_cast<int32_t>(place - 1 - diagonal);
    }
    if (step.drops_from_now) --place;
    diagonal += step.drops_from_now ? -1 : 1;
  }
  return found;
}

constexpr size_t kRemembered = 32;
constexpr size_t kRememberedNodes = 200'000;  // of all of them
constexpr size_t kMostEdits = 512;            // between graphs that are worth cutting

// The least part of a graph that must be the same as in another one for a cut, and as in all
// similar ones: where more differs it is another computation, which would run in pieces from then
// on.
constexpr double kLeastAlike = 0.75, kLeastAlikeInAll = 0.5;

// A name as messages show it. There are few names; they are never freed.
const std::string* interned(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>();
  static auto* mutex = new std::mutex();
  std::lock_guard lock(*mutex);
  return &*names->insert(name).first;
}

// A graph without its values. Specs are only compared, never read: they may be freed.
struct Outline {
  explicit Outline(const Graph& graph)
      : wiring(graph), outputs(graph.outputs), aliases(graph.aliases) {
    for (const ir::NodePtr& node : graph.nodes) {
      names.push_back(interned(node->spec()->name));
      specs.push_back(node->spec()->id);
      operators += node->spec()->operators;
      in_optimizer.push_back(node->spec()->numbers_vary);
      first_slots.push_back(slots.size());
      slots.insert(slots.end(), node->slots().begin(), node->slots().end());
    }
    first_slots.push_back(slots.size());
    for (const ir::NodePtr& leaf : graph.leaves) inputs.push_back(leaf->output_type(0));
  }

  std::vector<const std::string*> names;  // of the operators
  std::vector<uint64_t> specs;
  size_t operators = 0;  // that the nodes count as
  std::vector<bool> in_optimizer;
  std::vector<size_t> first_slots;  // per operator, and one past the last
  std::vector<ir::ScalarValue> slots;
  Wiring wiring;
  std::vector<bool> varies;  // per operator, whether it is where graphs differ
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
    return "operator " + std::to_string(i) + ", " + *now.names[i] + ", has other arguments";
  }
  if (now.inputs.size() != before.inputs.size()) return "other tensors are the same";
  if (now.outputs != before.outputs) {
    return std::to_string(now.outputs.size()) + " results are alive at its end, not " +
           std::to_string(before.outputs.size()) + " or not the same";
  }
  if (now.aliases != before.aliases) return "other tensors are written in place";
  return "operators take each other's results differently";
}

// Which operators differ from those of another graph, or from where graphs have differed.
struct Difference {
  const Outline* before;
  std::vector<bool> differs;
  size_t edits;
  bool in_sizes;      // the same operators, on an input of another size
  bool in_optimizer;  // some of them are an optimizer's, whose first step is another one: once
  std::vector<int32_t> places;  // as in Alignment
};

bool is_mostly_kept(const Difference& difference) {
  const auto& places = difference.places;
  const auto is_kept = [](int32_t place) { return place >= 0; };
  return std::count_if(places.begin(), places.end(), is_kept) >= kLeastAlike * places.size();
}

// Which slots will have other values, judged by a similar graph: positions (kPlace) that differ
// there, and the numbers of operators that it lacks, which may be those of a schedule's next step.
std::vector<bool> varying_slots(const Graph& graph, const Outline& before,
                                const std::vector<int32_t>& places) {
  std::vector<bool> varying;
  for (size_t i = 0; i < places.size(); ++i) {
    const ir::Node& node = *graph.nodes[i].get();
    for (size_t j = 0; j < node.slots().size(); ++j) {
      const ir::SlotSpec& slot = node.spec()->slots[j];
      const bool is_place = slot.kind == ir::SlotKind::kPlace;
      if (places[i] < 0) {
        varying.push_back(!is_place && !slot.optional);
      } else {
        const size_t other = before.first_slots[places[i]] + j;
        varying.push_back(is_place && before.slots[other].i != node.slots()[j].i);
      }
    }
  }
  return varying;
}

// Nothing if those are many.
std::optional<Difference> compare(const Outline& now, const Outline& before, size_t most) {
  const auto alignment = align(now.specs, before.specs, most);
  if (!alignment) return std::nullopt;
  const std::vector<int32_t>& places = alignment->places;
  Difference found{&before,
                   std::vector<bool>(places.size(), false),
                   alignment->edits,
                   now.names == before.names && now.inputs != before.inputs,
                   false,
                   places};
  std::vector<bool> is_kept(before.specs.size(), false);
  for (size_t i = 0; i < places.size(); ++i) {
    if (places[i] >= 0) is_kept[places[i]] = true;
    found.in_optimizer = found.in_optimizer || (places[i] < 0 && now.in_optimizer[i]);
  }
  for (size_t i = 0; i < is_kept.size(); ++i) {
    found.in_optimizer = found.in_optimizer || (!is_kept[i] && before.in_optimizer[i]);
  }
  for (size_t i = 0; i < places.size(); ++i) {
    found.differs[i] = places[i] < 0 || before.varies[places[i]];
    if (found.differs[i]) continue;
    // It differs, too, if it takes other operators' results; one that differs itself does not
    // count, as the cut separates it.
    const auto operands = now.wiring.operands(i), others = before.wiring.operands(places[i]);
    for (size_t j = 0; j < operands.size(); ++j) {
      const int32_t place = operands[j] < 0 ? -1 : places[operands[j]];
      const bool is_cut = operands[j] >= 0 && found.differs[operands[j]];
      const bool was_cut = others[j] >= 0 && (!is_kept[others[j]] || before.varies[others[j]]);
      if (!is_cut && !(was_cut && operands[j] < 0) && place != others[j]) found.differs[i] = true;
    }
  }
  return found;
}

class History {
 public:
  static History& get() {
    static auto* instance = new History();
    return *instance;
  }

  Past recall(const Graph& graph) {
    Outline now(graph);
    std::lock_guard lock(mutex_);
    std::string what = explain(now);
    Past past;
    now.varies.assign(now.specs.size(), false);
    size_t alike = 0;
    for (const Difference& difference : differences(now)) {  // the smallest first
      if (past.varying.empty() && is_mostly_kept(difference)) {
        past.varying = varying_slots(graph, *difference.before, difference.places);
      }
      if (what.empty()) what = ": like one before, but for " + list_names(now, difference.differs);
      if (difference.in_optimizer) continue;
      std::vector<bool> varies = difference.differs;
      for (size_t i = 0; i < varies.size(); ++i) varies[i] = varies[i] || now.varies[i];
      const double least = past.stages.empty() ? kLeastAlike : kLeastAlikeInAll;
      std::vector<uint32_t> stages = find_stages(graph, now.wiring, varies, least);
      if (stages.empty()) continue;
      past.goes_on_changing = past.goes_on_changing || difference.in_sizes || ++alike > 1;
      past.stages = std::move(stages);
      now.varies = std::move(varies);
      for (size_t i = 0; i < past.stages.size(); ++i) {
        if (past.stages[i] == kBefore) now.varies[i] = true;
      }
    }
    past.reason = "a new graph" + what;
    nodes_ += now.specs.size();
    outlines_.push_front(std::move(now));
    while (outlines_.size() > kRemembered || (nodes_ > kRememberedNodes && outlines_.size() > 1)) {
      nodes_ -= outlines_.back().specs.size();
      outlines_.pop_back();
    }
    return past;
  }

 private:
  static std::string list_names(const Outline& now, const std::vector<bool>& which) {
    constexpr size_t kMostListed = 4;
    std::vector<std::string> names;
    for (size_t i = 0; i < which.size(); ++i) {
      if (which[i]) names.push_back(*now.names[i] + " (operator " + std::to_string(i) + ")");
    }
    if (names.empty()) return "operators that it lacks";
    const size_t more = names.size() - std::min(names.size(), kMostListed);
    names.resize(names.size() - more);
    return c10::Join(", ", names) + (more ? " and " + std::to_string(more) + " more" : "");
  }

  std::string explain(const Outline& now) const {
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
    return like ? compare_in_words(now, *like) : "";
  }

  std::vector<Difference> differences(const Outline& now) const {
    std::vector<Difference> found;
    const size_t most = std::min(now.operators / 2, kMostEdits);
    for (const Outline& before : outlines_) {  // the newest first
      if (auto difference = compare(now, before, most)) found.push_back(std::move(*difference));
    }
    std::stable_sort(found.begin(), found.end(),
                     [](const Difference& a, const Difference& b) { return a.edits < b.edits; });
    return found;
  }

  static bool is_same(const Outline& now, const Outline& before, size_t common) {
    return common == now.names.size() && common == before.names.size();
  }

  static std::string compare_in_words(const Outline& now, const Outline& before) {
    size_t common = common_operators(now, before);
    if (is_same(now, before, common)) {
      return ": like one before, but " + difference(now, before);
    }
    std::string text = ": like one before up to operator " + std::to_string(common);
    if (common == now.names.size()) return text + ", where it ends";
    text += ", " + *now.names[common];
    if (common < before.names.size()) text += ", which was " + *before.names[common];
    return text;
  }

  std::mutex mutex_;
  std::deque<Outline> outlines_;
  size_t nodes_ = 0;  // of all outlines
};

}  // namespace

Past recall(const Graph& graph) { return History::get().recall(graph); }

}  // namespace lazyxla::graph
