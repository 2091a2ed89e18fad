// The programs of this process, by their keys.
#include <algorithm>

#include "common/bounded_map.h"
#include "common/counters.h"
#include "common/locks.h"
#include "common/options.h"
#include "pjrt/host_memory.h"
#include "program/program.h"

namespace lazyxla::program {
namespace {

using ProgramRef = std::shared_ptr<Program>;

struct Cache {
  ska::flat_hash_map<uint64_t, std::vector<ProgramRef>> programs;
  size_t size = 0;
  size_t misses = 0;
  struct Dropped {};
  BoundedMap<uint64_t, Dropped> dropped;  // to explain why they are compiled again

  ProgramRef find(const Graph& graph) const {
    const auto bucket = programs.find(graph.hash);
    if (bucket == programs.end()) return nullptr;
    const auto found = std::ranges::find_if(
        bucket->second, [&](const ProgramRef& program) { return program->key() == graph.key; });
    return found == bucket->second.end() ? nullptr : *found;
  }

  ProgramRef add(const Graph& graph) {
    ++size;
    auto& bucket = programs[graph.hash];
    bucket.push_back(std::make_shared<Program>(graph, dropped.find(graph.hash) != nullptr));
    return bucket.back();
  }

  // False if it is gone already.
  bool drop(const ProgramRef& program) {
    const uint64_t hash = program->hash();
    const auto bucket = programs.find(hash);
    if (bucket == programs.end() || std::erase(bucket->second, program) == 0) return false;
    if (bucket->second.empty()) programs.erase(bucket);
    dropped.insert(hash, {}, static_cast<size_t>(options().max_calls.load()));
    --size;
    return true;
  }
};

auto& cache = *new Guarded<Cache>();

// Of compiled forms; a program that could not be lowered counts as one.
int64_t count() { return std::max<int64_t>(size_of_variants(), cached_programs()); }

bool is_full() {
  if (count() >= options().max_programs) return true;
  const size_t misses = ++cache.hold()->misses;
  return misses % 64 == 0 && pjrt::mappings_run_out();
}

// Programs that have a quarter of all.
std::vector<ProgramRef> find_oldest() {
  std::vector<ProgramRef> programs;
  {
    const auto held = cache.hold();
    for (const auto& [hash, bucket] : held->programs) {
      programs.insert(programs.end(), bucket.begin(), bucket.end());
    }
  }
  std::vector<std::pair<Program::Use, ProgramRef>> all;
  for (ProgramRef& program : programs) {
    if (auto use = program->use()) all.emplace_back(*use, std::move(program));
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return a.first.last_run < b.first.last_run; });
  std::vector<ProgramRef> oldest;
  // More than a quarter, if the setting was lowered meanwhile.
  int64_t to_drop = std::max<int64_t>(count() / 4, count() - options().max_programs + 1);
  to_drop = std::max<int64_t>(to_drop, 1);
  for (auto& [use, program] : all) {
    if (to_drop <= 0) break;
    to_drop -= std::max<int64_t>(use.size, 1);
    oldest.push_back(std::move(program));
  }
  return oldest;
}

}  // namespace

std::shared_ptr<Program> find_program(const Graph& graph) {
  if (ProgramRef known = cache.hold()->find(graph)) return known;
  std::vector<ProgramRef> oldest;  // die without the lock: unloading takes a while
  if (is_full()) oldest = find_oldest();
  const auto held = cache.hold();
  if (ProgramRef known = held->find(graph)) return known;  // another thread was faster
  Counters::get().programs_dropped +=
      std::ranges::count_if(oldest, [&](const ProgramRef& old) { return held->drop(old); });
  return held->add(graph);
}

bool is_known(const Graph& graph) {
  const ProgramRef known = cache.hold()->find(graph);
  return known || is_on_disk(graph);
}

size_t cached_programs() { return cache.hold()->size; }

}  // namespace lazyxla::program
