#include "program/cut.h"

#include <c10/util/flat_hash_map.h>
#include <c10/util/hash.h>

#include <algorithm>

namespace lazyxla::graph {
namespace {

// A smaller graph is compiled in seconds.
constexpr size_t kMany = 1024;
// What a program of rounds has at least, so that running it takes longer than starting it.
constexpr size_t kFewest = 128;
constexpr size_t kLeastCount = 3;
// The least part of a round that is as in the round before: each may have a leaf of its own, such
// as a batch.
constexpr double kAlike = 0.9;

// Per node what is the same in every round: the operator, and which leaves it takes.
std::vector<uint64_t> symbols(const Graph& graph, const Wiring& wiring) {
  std::vector<uint64_t> symbols;
  for (size_t i = 0; i < wiring.size(); ++i) {
    uint64_t symbol = graph.nodes[i]->spec()->id;
    for (size_t j = 0; j < wiring.operands(i).size(); ++j) {
      const bool is_leaf = wiring.operands(i)[j] < 0;
      symbol = c10::hash_combine(symbol, is_leaf ? graph.operand(i, j) : ~uint64_t{0});
    }
    symbols.push_back(symbol);
  }
  return symbols;
}

// Distances at which runs of symbols recur, the most frequent first.
std::vector<size_t> distances(const std::vector<uint64_t>& symbols) {
  constexpr size_t kRun = 8, kTried = 8;
  ska::flat_hash_map<uint64_t, size_t> last, counts;
  for (size_t i = 0; i + kRun <= symbols.size(); ++i) {
    uint64_t run = 0;
    for (size_t j = 0; j < kRun; ++j) run = c10::hash_combine(run, symbols[i + j]);
    const auto [before, is_new] = last.emplace(run, i);
    if (!is_new) ++counts[i - std::exchange(before->second, i)];
  }
  std::vector<std::pair<size_t, size_t>> found;
  for (const auto& [distance, count] : counts) found.emplace_back(count, distance);
  std::sort(found.begin(), found.end(), std::greater<>());
  std::vector<size_t> distances;
  for (size_t i = 0; i < std::min(found.size(), kTried); ++i) distances.push_back(found[i].second);
  return distances;
}

struct Range {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};

// The longest range in which the symbols recur after `period`.
Range longest_range(const std::vector<uint64_t>& symbols, size_t period) {
  const size_t n = symbols.size();
  std::vector<size_t> same{0};  // among the first i
  for (size_t i = 0; i + period < n; ++i) {
    same.push_back(same.back() + (symbols[i] == symbols[i + period]));
  }
  Range longest, run;
  for (size_t i = 0; i + 2 * period <= n; ++i) {
    const bool alike = static_cast<double>(same[i + period] - same[i]) >= kAlike * period;
    if (!alike) continue;
    if (run.end < i + 2 * period - 1) run.begin = i;  // the one before was not alike
    run.end = i + 2 * period;
    if (run.size() > longest.size()) longest = run;
  }
  return longest;
}

// Per position, how many values are made before and used from there on.
std::vector<size_t> crossings(const Wiring& wiring) {
  std::vector<size_t> last_use(wiring.size(), 0);
  for (size_t i = 0; i < wiring.size(); ++i) {
    for (int32_t operand : wiring.operands(i)) {
      if (operand >= 0) last_use[operand] = i;
    }
  }
  std::vector<int64_t> change(wiring.size() + 2, 0);
  for (size_t i = 0; i < wiring.size(); ++i) {
    if (last_use[i] <= i) continue;
    ++change[i + 1];
    --change[last_use[i] + 1];
  }
  std::vector<size_t> crossings;
  int64_t open = 0;
  for (int64_t each : change) crossings.push_back(static_cast<size_t>(open += each));
  return crossings;
}

// Whether something in a range takes a result of one in the range of the same size before.
bool follows(const Wiring& wiring, size_t begin, size_t size) {
  for (size_t i = begin; i < begin + size; ++i) {
    for (int32_t operand : wiring.operands(i)) {
      const auto place = static_cast<size_t>(operand);
      if (operand >= 0 && place < begin && place + size >= begin) return true;
    }
  }
  return false;
}

}  // namespace

Rounds find_rounds(const Graph& graph) {
  if (graph.nodes.size() < kMany) return {};
  const Wiring wiring(graph);
  const std::vector<uint64_t> symbol = symbols(graph, wiring);
  size_t period = 0;
  Range range;
  for (size_t distance : distances(symbol)) {
    const Range found = longest_range(symbol, distance);
    // A multiple of a period is one, too, with a range hardly longer.
    const size_t tolerance = std::max(period, distance);
    const bool is_longer = found.size() > range.size() + tolerance;
    const bool is_shorter = distance < period && found.size() + tolerance >= range.size();
    if (!is_longer && !is_shorter) continue;
    period = distance;
    range = found;
  }
  if (period == 0) return {};
  const size_t size = (kFewest + period - 1) / period * period;
  if (range.size() < kLeastCount * size || range.size() * 2 < wiring.size()) return {};
  const std::vector<size_t> crossing = crossings(wiring);
  // Among equally good positions the one from which the sequence of operators is the first in
  // order: it does not depend on where in a round the graph begins.
  const auto is_better = [&](size_t a, size_t b) {
    if (crossing[a + size] != crossing[b + size]) return crossing[a + size] < crossing[b + size];
    for (size_t i = 0; i < period; ++i) {
      const uint64_t x = graph.nodes[a + i]->spec()->id, y = graph.nodes[b + i]->spec()->id;
      if (x != y) return x < y;
    }
    return false;
  };
  size_t first = range.begin;
  for (size_t i = range.begin; i < range.begin + period; ++i) {
    if (is_better(i, first)) first = i;
  }
  if (!follows(wiring, first + size, size)) return {};  // alike, but no loop
  Rounds rounds{std::vector<uint32_t>(wiring.size()), size, (range.end - first) / size};
  const size_t before = first > 0 ? 1 : 0;
  for (size_t i = first; i < wiring.size(); ++i) {
    rounds.stages[i] = before + std::min((i - first) / size, rounds.count);
  }
  return rounds.count < kLeastCount ? Rounds{} : rounds;
}

}  // namespace lazyxla::graph
