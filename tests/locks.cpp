// Uses locks as its argument says. Built with LAZYXLA_CHECK_LOCKS it aborts where the rule of
// Guarded values is broken; prints what it counted.
#include "common/locks.h"

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "common/waiting.h"

using namespace lazyxla;

namespace {

Guarded<int> one, other;
Guarded<int, SpinLock> spinning;
OrderedMutex ordered;
SpinLock bare;
std::condition_variable changed;

constexpr int kThreads = 4, kRounds = 20000;

template <typename Lock>
int count() {
  Guarded<int, Lock> counter;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < kRounds; ++j) ++*counter.hold();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *counter.hold();
}

// A number goes to and fro between two threads, each of which waits for it.
int pass_on() {
  Guarded<int> turn;
  std::array<std::thread, 2> players;
  for (int own = 0; own < 2; ++own) {
    players[own] = std::thread([&, own] {
      for (int i = 0; i < 1000; ++i) {
        const auto held = turn.hold();
        held.wait(changed, [&] { return *held % 2 == own; });
        ++*held;
        changed.notify_all();
      }
    });
  }
  for (std::thread& player : players) player.join();
  return *turn.hold();
}

int time_out() {
  const auto held = one.hold();
  const auto soon = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);
  return held.wait_until(changed, soon, [] { return false; });
}

// What another thread announces while this one waits, many times.
int announced() {
  std::atomic<int> reached{0}, asked{0};
  std::thread thread([&] {
    for (int i = 1; i <= 1000; ++i) {
      waiting::wait([&] { return asked >= i; });
      reached = i;
      waiting::announce();
    }
  });
  for (int i = 1; i <= 1000; ++i) {
    asked = i;
    waiting::announce();
    waiting::wait([&] { return reached == i; });
  }
  thread.join();
  return reached;
}

int under(const std::function<void()>& action) {
  const auto held = one.hold();
  action();
  return 1;
}

const std::map<std::string, std::function<int()>> kCases = {
    {"count", count<std::mutex>},
    {"count spinning", count<SpinLock>},
    {"pass on", pass_on},
    {"time out", time_out},
    {"announced", announced},
    {"guarded under ordered",
     [] {
       std::lock_guard lock(ordered);
       std::lock_guard device(bare);
       ++*spinning.hold();
       return ++*one.hold();
     }},
    {"one after the other",
     [] {
       for (int i = 0; i < 10; ++i) {
         ++*one.hold();
         ++*other.hold();
         ++*spinning.hold();
       }
       return *spinning.hold();
     }},
    {"! guarded", [] { return under([] { ++*other.hold(); }); }},
    {"! spinning", [] { return under([] { ++*spinning.hold(); }); }},
    {"! bare", [] { return under([] { std::lock_guard lock(bare); }); }},
    {"! ordered", [] { return under([] { std::lock_guard lock(ordered); }); }},
    {"! trying", [] { return under([] { std::unique_lock lock(ordered, std::try_to_lock); }); }},
    {"! waiting", [] { return under([] { waiting::wait([] { return true; }); }); }},
    {"! in one statement", [] { return *one.hold() + *other.hold(); }},
    {"! as an argument", [] { return std::max(*spinning.hold(), *one.hold()); }},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    for (const auto& [name, use] : kCases) std::puts(name.c_str());
    return 0;
  }
  std::printf("%d\n", kCases.at(argv[1])());
}
