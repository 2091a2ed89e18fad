#include "common/waiting.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "common/fork.h"

namespace lazyxla::waiting {
namespace {

constexpr auto kLook = std::chrono::milliseconds(50);  // between two looks for signals

// One for the whole process: few threads ever wait, and none for long in steady state.
struct Room {
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<int> waiting{0};
  void (*signal_check)() = nullptr;
  std::thread::id main_thread;

  static Room& get() {
    static auto* instance = new Room();  // threads may wait until the process ends
    return *instance;
  }
};

struct Waiting {
  explicit Waiting(Room& room) : room(room) { room.waiting.fetch_add(1); }
  ~Waiting() { room.waiting.fetch_sub(1); }
  Room& room;
};

}  // namespace

void wait(const std::function<bool()>& ready) {
  Room& room = Room::get();
  Waiting waiting(room);  // before the first look: whoever announces after it takes the mutex
  const bool interruptible = is_interruptible();
  while (true) {
    {
      std::unique_lock lock(room.mutex);
      if (room.wake.wait_for(lock, kLook, ready)) return;
    }
    if (interruptible) room.signal_check();
  }
}

void announce() {
  if (forked()) return;  // nobody waits here, and a thread of the parent may have the mutex
  Room& room = Room::get();
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (room.waiting.load() == 0) return;
  {
    std::lock_guard lock(room.mutex);
  }  // a waiter is either before its look, or asleep
  room.wake.notify_all();
}

bool is_interruptible() {
  const Room& room = Room::get();
  return room.signal_check != nullptr && std::this_thread::get_id() == room.main_thread;
}

void set_signal_check(void (*check)()) {
  Room& room = Room::get();
  room.main_thread = std::this_thread::get_id();
  room.signal_check = check;
}

}  // namespace lazyxla::waiting
