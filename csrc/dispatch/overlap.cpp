#include "dispatch/overlap.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <utility>

#include "common/hash.h"
#include "dispatch/checks.h"
#include "dispatch/known_calls.h"
#include "dispatch/plain_call.h"
#include "dispatch/tensor.h"

namespace lazyxla::dispatch {
namespace {

using Args = c10::ArrayRef<c10::IValue>;
using at::MemOverlapStatus;

const c10::StorageImpl* memory_of(const c10::TensorImpl& tensor) {
  return tensor.unsafe_storage().unsafeGetStorageImpl();
}

bool share_storage(const c10::TensorImpl& a, const c10::TensorImpl& b) {
  return memory_of(a) == memory_of(b);
}

void check_within(const OpInfo& info, c10::TensorImpl* target) {
  // Constant fills may overlap: every order gives the same.
  if (info.may_overlap || target->is_non_overlapping_and_dense()) return;
  at::assert_no_internal_overlap(target);
}

// Whether a written tensor's memory is that of another argument, too. An in-place operator reads
// what it writes through the same argument, which does not count.
bool shares_memory(const OpInfo& info, const Scan& scan) {
  const size_t own = info.reads_written ? 1 : 0;
  if (scan.written.size() == 1) {
    size_t readers = 0;
    for (const c10::TensorImpl* operand : scan.operands) {
      readers += share_storage(*operand, *scan.written[0]);
    }
    return readers > own;
  }
  // Of list operators: thousands of tensors.
  ska::flat_hash_map<const c10::StorageImpl*, size_t> readers;
  for (const c10::TensorImpl* operand : scan.operands) ++readers[memory_of(*operand)];
  for (const c10::TensorImpl* target : scan.written) {
    auto found = readers.find(memory_of(*target));
    if (found != readers.end() && found->second > own) return true;
  }
  return false;
}

struct Argument {
  at::Tensor tensor;
  size_t position;
};

std::vector<Argument> lazy_tensors(const OpInfo& info, Args args) {
  std::vector<Argument> result;
  for (size_t i = 0; i < args.size(); ++i) {
    if (info.args[i].kind != ArgKind::kTensor && info.args[i].kind != ArgKind::kTensorList) {
      continue;
    }
    std::vector<at::Tensor> tensors;
    flatten(args[i], tensors);
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined() && is_lazy(*tensor.unsafeGetTensorImpl()) && tensor.has_storage()) {
        result.push_back({std::move(tensor), i});
      }
    }
  }
  return result;
}

// How much of the written memory an operator also reads through another argument.
struct Shared {
  bool full = false, part = false;
};

Shared shared_memory(const OpInfo& info, const std::vector<Argument>& arguments) {
  Shared shared;
  ska::flat_hash_map<const c10::StorageImpl*, std::vector<const at::Tensor*>> read;
  for (const Argument& other : arguments) {
    if (info.args[other.position].written) continue;
    read[memory_of(*other.tensor.unsafeGetTensorImpl())].push_back(&other.tensor);
  }
  for (const Argument& target : arguments) {
    if (!info.args[target.position].written) continue;
    auto found = read.find(memory_of(*target.tensor.unsafeGetTensorImpl()));
    if (found == read.end()) continue;
    for (const at::Tensor* other : found->second) {
      // A constant fill reads its one value before it writes.
      if (info.may_overlap && other->dim() == 0) continue;
      const MemOverlapStatus status = at::get_overlap_status(target.tensor, *other);
      shared.full |= status == MemOverlapStatus::Full;
      shared.part |= status == MemOverlapStatus::Partial;
    }
  }
  return shared;
}

[[noreturn]] void refuse() {
  TORCH_CHECK(false,
              "unsupported operation: some elements of the input tensor and the written-to tensor "
              "refer to a single memory location. Please clone() the tensor before performing the "
              "operation.");
}

// Whether a written tensor's elements may be among another tensor's: by where in the memory each
// tensor begins and ends. For lists of thousands of tensors that may be parts of one memory.
bool has_shared_elements(const OpInfo& info, const std::vector<Argument>& arguments) {
  struct Range {
    const c10::StorageImpl* memory;
    int64_t first, last;  // bytes
    bool is_written;
  };
  std::vector<Range> ranges;
  for (const Argument& argument : arguments) {
    const at::Tensor& tensor = argument.tensor;
    if (tensor.numel() == 0) continue;
    int64_t last = tensor.storage_offset();
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    ranges.push_back(
        {memory_of(*tensor.unsafeGetTensorImpl()), tensor.storage_offset() * tensor.element_size(),
         (last + 1) * tensor.element_size() - 1, info.args[argument.position].written});
  }
  std::ranges::sort(ranges, std::less<>(),
                    [](const Range& range) { return std::pair(range.memory, range.first); });
  int64_t last = 0, last_written = 0;  // of those that begin before
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Range& range = ranges[i];
    if (i == 0 || range.memory != ranges[i - 1].memory) last = last_written = -1;
    if (range.first <= last_written || (range.is_written && range.first <= last)) return true;
    last = std::max(last, range.last);
    if (range.is_written) last_written = std::max(last_written, range.last);
  }
  return false;
}

// Whether the CPU kernel can be called with memory that is shared in the same way.
bool is_small(const std::vector<Argument>& arguments) {
  constexpr int64_t kElements = 4096;
  constexpr size_t kBytes = 1 << 20;
  int64_t elements = 0;
  size_t bytes = 0;
  for (const Argument& argument : arguments) {
    elements += argument.tensor.numel();
    bytes = std::max(bytes, argument.tensor.storage().nbytes());
  }
  return elements <= kElements && bytes <= kBytes;
}

// Throws if the CPU's kernel refuses the memory that the call's arguments share. Its other errors
// are inference's to raise.
void ask_cpu(const OpInfo& info, Args args, bool small) {
  try {
    check_as_cpu(info, args, {.fill = 0, .shrink = !small, .share = true});
  } catch (const std::exception& error) {
    if (std::string_view(error.what()).find("memory location") != std::string_view::npos) throw;
  }
}

// Pointwise operators read each element before they write it.
bool is_pointwise(const OpInfo& info) { return info.functional.hasTag(at::Tag::pointwise); }

// List operators read each tensor before they write it. What a user's kernel does with made-up data
// is unknown.
bool may_ask(const OpInfo& info) { return !info.writes_list && info.name.starts_with("aten::"); }

// The kinds of calls that the CPU kernel accepted.
auto& asked_calls = *new KnownCalls();

void check_between(const OpInfo& info, Args args, const std::vector<Argument>& arguments,
                   const Scan* scan) {
  const Shared shared = shared_memory(info, arguments);
  if (!shared.part && (!shared.full || is_pointwise(info))) return;
  const bool small = is_small(arguments);
  if (shared.part && !(may_ask(info) && small)) refuse();
  if (!may_ask(info)) return;
  if (scan == nullptr) {
    ask_cpu(info, args, small);
    return;
  }
  // Which arguments share what memory is no part of the key.
  uint64_t hash = hash_words(scan->key.data(), scan->key.size());
  auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15ull; };
  for (const Argument& target : arguments) {
    mix(target.tensor.storage_offset());
    for (const Argument& other : arguments) {
      mix(share_storage(*target.tensor.unsafeGetTensorImpl(), *other.tensor.unsafeGetTensorImpl()));
    }
  }
  if (asked_calls.contains(hash)) return;
  ask_cpu(info, args, small);
  asked_calls.add(hash);
}

}  // namespace

bool check_overlap(const OpInfo& info, Args args, const Scan& scan) {
  for (c10::TensorImpl* target : scan.written) check_within(info, target);
  if (!shares_memory(info, scan)) return true;
  const std::vector<Argument> arguments = lazy_tensors(info, args);
  if (info.writes_list) return !has_shared_elements(info, arguments);
  check_between(info, args, arguments, &scan);
  return true;
}

void check_overlap_on_host(const OpInfo& info, Args args) {
  const std::vector<Argument> arguments = lazy_tensors(info, args);
  for (const Argument& argument : arguments) {
    if (info.args[argument.position].written) {
      check_within(info, argument.tensor.unsafeGetTensorImpl());
    }
  }
  check_between(info, args, arguments, nullptr);
}

}  // namespace lazyxla::dispatch
