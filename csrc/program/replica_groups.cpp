#include "program/replica_groups.h"

#include <algorithm>
#include <iterator>
#include <numeric>

namespace lazyxla::graph {
namespace {

struct Axis {
  int64_t stride, size;  // between neighbours' ranks; processes
};

// Empty if it is not a row: ascending, with one stride.
std::optional<Axis> axis_of(const Ranks& group) {
  const int64_t stride = group.size() > 1 ? group[1] - group[0] : 1;
  for (size_t i = 1; i < group.size(); ++i) {
    if (stride <= 0 || group[i] - group[i - 1] != stride) return std::nullopt;
  }
  return Axis{stride, static_cast<int64_t>(group.size())};
}

bool includes(const Ranks& all, const Ranks& some) {
  return std::includes(all.begin(), all.end(), some.begin(), some.end());
}

// The ranks reached from `ranks` along an axis, of which `row` is the row through `from`.
Ranks extended(const Ranks& ranks, const Ranks& row, int64_t from) {
  Ranks reached;
  for (int64_t rank : ranks) {
    for (int64_t place : row) reached.push_back(rank + place - from);
  }
  std::sort(reached.begin(), reached.end());
  return reached;
}

// The axes, by the positions of groups that are such; the rest are along several.
class Grid {
 public:
  explicit Grid(const std::vector<Ranks>& groups) : groups_(groups) {}

  bool find_axes() {
    Ranks common = groups_[0];
    for (const Ranks& group : groups_) {
      if (!axis_of(group)) return false;
      Ranks both;
      std::set_intersection(common.begin(), common.end(), group.begin(), group.end(),
                            std::back_inserter(both));
      common = std::move(both);
    }
    if (common.empty()) return false;
    here_ = common[0];
    std::vector<size_t> order(groups_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return groups_[a].size() < groups_[b].size(); });
    for (size_t group : order) {
      if (along(groups_[group]) == groups_[group]) continue;
      axes_.push_back(group);
    }
    std::sort(axes_.begin(), axes_.end(), [&](size_t a, size_t b) {
      return axis_of(groups_[a])->stride < axis_of(groups_[b])->stride;
    });
    int64_t reach = 1;  // of the axes with smaller strides together
    for (size_t number : axes_) {
      const Axis axis = *axis_of(groups_[number]);
      if (axis.stride < reach) return false;  // rows of both would cross
      reach = axis.stride * axis.size;
    }
    return true;
  }

  // The ranks reached from here along the axes that are within `within`.
  Ranks along(const Ranks& within) const {
    Ranks reached{here_};
    for (size_t number : axes_) {
      const Ranks& row = groups_[number];
      if (includes(within, row)) reached = extended(reached, row, here_);
    }
    return reached;
  }

  Ranks all() const {
    Ranks reached{here_};
    for (size_t number : axes_) reached = extended(reached, groups_[number], here_);
    return reached;
  }

  // All groups of this one's kind.
  std::vector<Ranks> rows(const Ranks& group, const Ranks& all) const {
    Ranks corners{group[0]};  // of each its first
    for (size_t number : axes_) {
      const Ranks& row = groups_[number];
      if (!includes(group, row)) corners = extended(corners, row, here_);
    }
    std::vector<Ranks> found;
    for (int64_t corner : corners) {
      Ranks replicas;
      for (int64_t rank : group) {
        const int64_t moved = rank + corner - group[0];
        replicas.push_back(std::lower_bound(all.begin(), all.end(), moved) - all.begin());
      }
      found.push_back(std::move(replicas));
    }
    return found;
  }

 private:
  const std::vector<Ranks>& groups_;
  int64_t here_ = 0;
  std::vector<size_t> axes_;
};

}  // namespace

std::optional<ReplicaGroups> arrange(const std::vector<Ranks>& groups) {
  Grid grid(groups);
  if (!grid.find_axes()) return std::nullopt;
  ReplicaGroups found{grid.all(), {}};
  for (const Ranks& group : groups) {
    if (grid.along(group) != group) return std::nullopt;
    found.rows.push_back(grid.rows(group, found.ranks));
  }
  return found;
}

}  // namespace lazyxla::graph
