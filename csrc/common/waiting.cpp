#include "common/waiting.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/fork.h"
#include "common/locks.h"

namespace lazyxla::waiting {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(50);  // between two looks for signals

// One for the whole process: few threads ever wait, and none for long in steady state.
struct Room {
  Guarded<uint64_t> announced;  // how often
  std::condition_variable wake;
  std::atomic<int> waiting{0};
  void (*signal_check)() = nullptr;
  std::thread::id main_thread;
  std::atomic<bool> watched{false};
  std::atomic<const std::string*> reason{nullptr};  // to give up; never freed

  static Room& get() {
    static auto* instance = new Room();  // threads may wait until the process ends
    return *instance;
  }
};

bool takes_signals() {
  const Room& room = Room::get();
  return room.signal_check != nullptr && std::this_thread::get_id() == room.main_thread;
}

struct Waiting {
  explicit Waiting(Room& room) : room(room) { room.waiting.fetch_add(1); }
  ~Waiting() { room.waiting.fetch_sub(1); }
  Room& room;
};

}  // namespace

void wait(const std::function<bool()>& ready) {
  Room& room = Room::get();
  check_none_held();
  Waiting waiting(room);  // before the first look: a later announcement is counted
  const bool has_signals = takes_signals();
  auto next_look = Clock::now() + kLook;
  while (true) {
    const uint64_t seen = *room.announced.hold();
    if (ready()) return;
    {
      const auto announced = room.announced.hold();
      announced.wait_until(room.wake, next_look, [&] { return *announced != seen; });
    }
    if (Clock::now() < next_look) continue;
    next_look = Clock::now() + kLook;
    if (has_signals) room.signal_check();
    check_given_up();
  }
}

void announce() {
  if (forked()) return;  // no thread waits here, and one of the parent may hold the lock
  Room& room = Room::get();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (room.waiting.load() == 0) return;
  ++*room.announced.hold();
  room.wake.notify_all();
}

void give_up(std::string reason) {
  const std::string* none = nullptr;
  const auto* text = new std::string(std::move(reason));
  if (!Room::get().reason.compare_exchange_strong(none, text)) delete text;
}

void check_given_up() {
  if (const std::string* reason = Room::get().reason.load()) throw std::runtime_error(*reason);
}

bool is_interruptible() { return takes_signals() || Room::get().watched.load(); }

void set_watched() { Room::get().watched = true; }

void set_signal_check(void (*check)()) {
  Room& room = Room::get();
  room.main_thread = std::this_thread::get_id();
  room.signal_check = check;
}

}  // namespace lazyxla::waiting
