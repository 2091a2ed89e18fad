#include "distributed/heartbeat.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "common/locks.h"
#include "common/waiting.h"

namespace lazyxla::distributed {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kLongestSilence{100'000}, kShortestInterval{100};
constexpr int kBeats = 6;  // that must be missed in a row
constexpr char kGone[] = "gone", kDone[] = "done";

class Heartbeat {
 public:
  Heartbeat(c10::intrusive_ptr<c10d::Store> store, size_t member, size_t members,
            milliseconds timeout)
      : store_(std::move(store)),
        own_key_(key(member)),
        watched_((member + 1) % members),
        silence_(std::min(timeout, kLongestSilence)),
        thread_([this] { run(); }) {}

  void stop() {
    *is_over_.hold() = true;
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  static std::string key(size_t member) { return "alive/" + std::to_string(member); }

  void run() {
    const milliseconds interval = std::max(silence_ / kBeats, kShortestInterval);
    try {
      for (int64_t beat = 0;; ++beat) {
        store_->set(own_key_, std::to_string(beat));
        if (const std::string gone = found_gone(); !gone.empty()) return waiting::give_up(gone);
        const auto is_over = is_over_.hold();
        const auto next = steady_clock::now() + interval;
        if (is_over.wait_until(wake_, next, [&] { return *is_over; })) break;
      }
      store_->set(own_key_, kDone);
    } catch (const std::exception&) {  // the store is gone
    }
  }

  // The message about a process that is gone; empty if none is known to be.
  std::string found_gone() {
    if (store_->check({kGone})) return store_->get_to_str(kGone);
    std::string now = store_->check({key(watched_)}) ? store_->get_to_str(key(watched_)) : "";
    const auto time = steady_clock::now();
    if (now != seen_ || now == kDone) {
      seen_ = std::move(now);
      seen_at_ = time;
    }
    if (time - seen_at_ < silence_) return "";
    const std::string text = c10::str(
        "lazyxla: process ", watched_, " has ended, or its machine is gone: it was silent for ",
        silence_.count() / 1000.0, " s. What waits for its devices is given up");
    store_->set(kGone, text);
    return text;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string own_key_;
  size_t watched_;
  milliseconds silence_;
  std::string seen_;
  steady_clock::time_point seen_at_ = steady_clock::now();
  Guarded<bool> is_over_;
  std::condition_variable wake_;
  std::thread thread_;  // last: it uses the others
};

Heartbeat* heartbeat = nullptr;  // never destroyed: the process ends

}  // namespace

void start_heartbeat(c10::intrusive_ptr<c10d::Store> store, size_t member, size_t members,
                     milliseconds timeout) {
  if (heartbeat) return;
  waiting::set_watched();
  heartbeat = new Heartbeat(store->clone(), member, members, timeout);
}

void stop_heartbeat() {
  if (heartbeat) heartbeat->stop();
}

}  // namespace lazyxla::distributed
