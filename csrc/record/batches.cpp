#include "record/batches.h"

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "common/fork.h"
#include "common/locks.h"
#include "graph/runner.h"
#include "record/capture.h"
#include "record/flush.h"
#include "record/recording.h"

namespace lazyxla::record {
namespace {

constexpr size_t kLeast = 32, kMost = 64;               // operators in a batch
constexpr size_t kMaxPositions = 4096;                  // beyond them learning starts anew
constexpr auto kPause = std::chrono::milliseconds(20);  // between two looks
constexpr int kLongPause = 10;                          // looks
constexpr uint64_t kShortWhile = 16384;                 // operators

class Positions {
 public:
  bool ends(uint64_t op, size_t pending) {
    ++count_;
    // Every operator moves the earlier ones up by a byte: after eight they are out.
    position_ = (position_ << 8) ^ (op * 0x9e3779b97f4a7c15ull);
    if (pending < kLeast) return false;
    if (positions_.count(position_)) return true;
    if (pending < kMost) return false;
    learn();
    return true;
  }

  // To be asked at every look: whether what is pending was left lying and should run.
  bool is_left_lying(bool device_is_idle) {
    if (std::exchange(seen_, count_) != count_ || !device_is_idle) {
      looks_ = 0;
      return false;
    }
    if (++looks_ == 1) return is_second_pause();
    return looks_ == kLongPause;
  }

 private:
  void learn() {
    if (positions_.size() >= kMaxPositions) positions_.clear();
    positions_.insert(position_);
  }

  bool is_second_pause() {
    if (count_ - pauses_since_ > kShortWhile) {
      pauses_.clear();
      pauses_since_ = count_;
    }
    if (pauses_.insert(position_).second) return false;
    learn();
    return true;
  }

  uint64_t position_ = 0;
  uint64_t count_ = 0, seen_ = 0;  // operators in all, and at the last look
  int looks_ = 0;                  // since the last operator, at an idle device
  ska::flat_hash_set<uint64_t> positions_;
  ska::flat_hash_set<uint64_t> pauses_;  // positions of single pauses
  uint64_t pauses_since_ = 0;            // `count_` when they were last forgotten
};

struct Batches final : ir::Batching {
  Guarded<Positions, SpinLock> positions;

  static Batches& of(ir::PendingSet& pending) {
    if (ir::Batching* found = pending.batching.load(std::memory_order_acquire)) [[likely]] {
      return static_cast<Batches&>(*found);
    }
    auto fresh = std::make_unique<Batches>();
    ir::Batching* none = nullptr;
    if (pending.batching.compare_exchange_strong(none, fresh.get())) return *fresh.release();
    return static_cast<Batches&>(*none);
  }
};

class Watch {
 public:
  static Watch& get() {
    static auto* instance = new Watch();
    return *instance;
  }

  void watch() {
    if (watching_.load(std::memory_order_relaxed)) [[likely]]
      return;
    if (watching_.exchange(true)) return;
    static const auto* started [[maybe_unused]] = new ClientStarted();  // no child has it
    thread_ = std::thread([this] { run(); });
  }

  void stop() {
    *stopping_.hold() = true;
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    graph::begin_unattended_thread();
    while (!stops()) {
      for (const auto& recording : Recording::all()) {
        for (c10::DeviceIndex device = 0; device < 127; ++device) {
          if (ir::PendingSet* pending = recording->find(device)) look(*pending);
        }
      }
    }
  }

  bool stops() {
    const auto stopping = stopping_.hold();
    const auto pause_ends = std::chrono::steady_clock::now() + kPause;
    return stopping.wait_until(wake_, pause_ends, [&] { return *stopping; });
  }

  static void look(ir::PendingSet& pending) {
    // Nothing that a capture takes is waited for.
    if (Capture::current() || !pending.fused) return;
    try {
      const bool is_idle = graph::is_idle(pending.device);
      if (Batches::of(pending).positions.hold()->is_left_lying(is_idle)) {
        flush(pending, Cause::kMode);
      }
    } catch (const std::exception&) {  // a read reports it
    }
  }

  Guarded<bool> stopping_;
  std::condition_variable wake_;
  std::thread thread_;
  std::atomic<bool> watching_{false};
};

}  // namespace

bool batch_ends(ir::PendingSet& pending, uint64_t op) {
  pending.fused = true;
  Watch::get().watch();
  return Batches::of(pending).positions.hold()->ends(op, pending.nodes_recorded);
}

void stop_watching_batches() { Watch::get().stop(); }

}  // namespace lazyxla::record
