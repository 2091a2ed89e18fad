// Which calls of a sequence, that should be the same in all processes, are compared before data is
// exchanged.
//
// Comparing costs a message. So it can be left to the first times that a call follows another one:
// processes that agreed so far make the same choice, each for itself.
#pragma once

#include <c10/util/hash.h>

#include <cstddef>
#include <string>
#include <unordered_map>

namespace lazyxla::distributed {

enum class Comparison { kNever, kFirst, kAlways };

// "never", "first", "always".
inline Comparison comparison_named(const std::string& name) {
  if (name == "always") return Comparison::kAlways;
  return name == "never" ? Comparison::kNever : Comparison::kFirst;
}

class Sequence {
 public:
  explicit Sequence(Comparison comparison) : comparison_(comparison) {}

  // Whether the next call, given by a hash of what it is, is to be compared.
  bool is_next_compared(size_t call) {
    const size_t pair = c10::hash_combine(last_, call);
    last_ = call;
    if (comparison_ != Comparison::kFirst) return comparison_ == Comparison::kAlways;
    if (compared_.size() == kPairs && !compared_.count(pair)) return false;
    return compared_[pair]++ < kTimes;
  }

 private:
  static constexpr int kTimes = 2;        // that a pair of calls is compared
  static constexpr size_t kPairs = 4096;  // that are remembered; further ones are not compared

  Comparison comparison_;
  size_t last_ = 0;
  std::unordered_map<size_t, int> compared_;  // times, by pair of calls
};

}  // namespace lazyxla::distributed
