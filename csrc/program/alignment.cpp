#include "program/alignment.h"

#include <algorithm>

namespace lazyxla::graph {
namespace {

// How far in `now` so many edits lead. The place in `now` less that in `before` is the diagonal.
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

}  // namespace

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

}  // namespace lazyxla::graph
