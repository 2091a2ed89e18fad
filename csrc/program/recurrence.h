// Recurrence: whether the graphs that a line of the user's program causes come again.
//
// A training step is sure to recur, and is compiled at once; until experience shows otherwise. A
// loop over episodes, trees or molecules has another graph in each step, of which none comes twice.
// So for each line those graphs are counted that have come once only.
#pragma once

#include <atomic>
#include <memory>
#include <string>

namespace lazyxla::program {

class Line {
 public:
  // Null if the line is not known. The same object for the same text, as long as it is among the
  // lines used last.
  static std::shared_ptr<Line> of(const std::string& text);

  void note_new() { ++once_; }
  void note_again() { --once_; }
  // Whether so many came once only that the next one is not expected to come again.
  bool keeps_changing() const { return once_ > kMostOnce; }

  // Whether it pays to look for parts that a new one shares with others: not if those before shared
  // none.
  bool may_share() const { return without_share_ <= kMostOnce; }
  void note_plan(bool is_shared) { is_shared ? without_share_ = 0 : ++without_share_; }

 private:
  // A loop that settles has few such steps: the optimizer's first one, the last batch of an epoch.
  static constexpr int kMostOnce = 4;

  std::atomic<int> once_{0};
  std::atomic<int> without_share_{0};  // how many in a row
};

}  // namespace lazyxla::program
