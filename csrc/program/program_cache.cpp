// The programs of this process, by their keys.
#include <algorithm>
#include <mutex>

#include "common/bounded_map.h"
#include "common/counters.h"
#include "common/options.h"
#include "pjrt/host_memory.h"
#include "program/program.h"

namespace lazyxla::program {
namespace {

class Cache {
 public:
  std::shared_ptr<Program> find(const Graph& graph) {
    std::vector<std::shared_ptr<Program>> dead;  // dies without the lock: unloading takes a while
    std::lock_guard lock(mutex_);
    for (const auto& program : programs_[graph.hash]) {
      if (program->key() == graph.key) return program;
    }
    if (is_full()) dead = take_oldest();
    ++size_;
    auto& bucket = programs_[graph.hash];
    bucket.push_back(std::make_shared<Program>(graph, dropped_.find(graph.hash) != nullptr));
    return bucket.back();
  }

  bool contains(const Graph& graph) {
    std::lock_guard lock(mutex_);
    const auto found = programs_.find(graph.hash);
    return found != programs_.end() &&
           std::any_of(found->second.begin(), found->second.end(),
                       [&](const auto& program) { return program->key() == graph.key; });
  }

  size_t size() {
    std::lock_guard lock(mutex_);
    return size_;
  }

 private:
  bool is_full() {
    if (count() >= options().max_programs) return true;
    return ++misses_ % 64 == 0 && pjrt::mappings_run_out();
  }

  // Compiled forms; a program that could not be lowered counts as one.
  int64_t count() const { return std::max<int64_t>(live_variants(), size_); }

  // Programs that have a quarter of all.
  std::vector<std::shared_ptr<Program>> take_oldest() {
    std::vector<std::pair<Program::Use, std::shared_ptr<Program>>> all;
    for (const auto& [hash, bucket] : programs_) {
      for (const auto& program : bucket) {
        if (auto use = program->use()) all.emplace_back(*use, program);
      }
    }
    std::sort(all.begin(), all.end(),
              [](const auto& a, const auto& b) { return a.first.last_run < b.first.last_run; });
    std::vector<std::shared_ptr<Program>> oldest;
    // More than a quarter, if the setting was lowered meanwhile.
    int64_t to_drop = std::max<int64_t>(count() / 4, count() - options().max_programs + 1);
    to_drop = std::max<int64_t>(to_drop, 1);
    for (auto& [use, program] : all) {
      if (to_drop <= 0) break;
      to_drop -= std::max<int64_t>(use.variants, 1);
      uint64_t hash = program->hash();
      std::erase(programs_[hash], program);
      if (programs_[hash].empty()) programs_.erase(hash);
      dropped_.insert(hash, {}, static_cast<size_t>(options().max_calls.load()));
      oldest.push_back(std::move(program));
    }
    size_ -= oldest.size();
    Counters::get().programs_dropped += static_cast<int64_t>(oldest.size());
    return oldest;
  }

  std::mutex mutex_;
  ska::flat_hash_map<uint64_t, std::vector<std::shared_ptr<Program>>> programs_;
  size_t size_ = 0;
  size_t misses_ = 0;
  struct Dropped {};
  BoundedMap<uint64_t, Dropped> dropped_;  // to explain why they are compiled again
};

Cache& cache() {
  static auto* instance = new Cache();
  return *instance;
}

}  // namespace

std::shared_ptr<Program> find_program(const Graph& graph) { return cache().find(graph); }

bool is_known(const Graph& graph) { return cache().contains(graph) || is_on_disk(graph); }

size_t cached_programs() { return cache().size(); }

}  // namespace lazyxla::program
