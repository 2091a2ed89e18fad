#include "dispatch/checks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <map>

#include "common/hash.h"
#include "common/warnings.h"
#include "dispatch/known_calls.h"
#include "dispatch/tensor.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using Args = c10::ArrayRef<IValue>;

// Tensors with more elements are not made on the CPU just for an error message.
constexpr int64_t kLarge = 1 << 22;

// Arguments with CPU tensors for tensors.
class ToCpu {
 public:
  ToCpu(const OpInfo& info, Args args, const CpuCall& how) : how_(how) {
    if (how.shrink) find_sizes(device_tensors(info, args));
  }
  IValue operator()(const IValue& value, ArgKind kind);

 private:
  void find_sizes(const std::vector<at::Tensor>& tensors);
  void shrink(std::vector<int64_t>& sizes) const;
  IValue shrunk(const IValue& value) const;
  at::Tensor filled(const at::Tensor& tensor);
  at::Tensor made(const at::Tensor& tensor);
  at::Tensor on_same_storage(const at::Tensor& tensor);

  const CpuCall how_;
  std::map<int64_t, int64_t> small_;                      // what becomes of large sizes
  size_t next_ = 0;                                       // among the device's tensors
  std::vector<std::pair<at::Tensor, at::Tensor>> known_;  // with those that share memory
  std::map<std::pair<const c10::StorageImpl*, c10::ScalarType>, at::Tensor> storages_;
};

// Keeps the order of sizes (equal ones, the larger of two), so that kernels which compare them
// decide as on the real sizes.
void ToCpu::find_sizes(const std::vector<at::Tensor>& tensors) {
  constexpr int64_t kSmall = 4096;
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    elements += tensor.numel();
    for (int64_t size : tensor.sizes()) {
      if (size > CpuCall::kKept) small_[size] = 0;
    }
  }
  int64_t next = CpuCall::kKept;
  for (auto& [size, smaller] : small_) smaller = ++next;
  if (elements <= kSmall) small_.clear();
}

void ToCpu::shrink(std::vector<int64_t>& sizes) const {
  for (int64_t& size : sizes) {
    if (auto found = small_.find(size); found != small_.end()) size = found->second;
  }
}

at::Tensor ToCpu::made(const at::Tensor& tensor) {
  std::vector<int64_t> sizes = tensor.sizes().vec();
  shrink(sizes);
  const bool is_own = how_.dtypes.empty();
  auto options = at::dtype(is_own ? tensor.scalar_type() : how_.dtypes.at(next_++));
  // Elements that share their memory take none; only writing forms mind.
  bool spread = !how_.shrink && tensor.numel() > kLarge;
  return spread ? at::full({}, how_.fill, options).expand(sizes)
                : at::full(sizes, how_.fill, options);
}

at::Tensor ToCpu::on_same_storage(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  at::Tensor& memory = storages_[{storage.unsafeGetStorageImpl(), tensor.scalar_type()}];
  if (!memory.defined()) {
    const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
    memory = at::full({elements}, how_.fill, at::dtype(tensor.scalar_type()));
  }
  return memory.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor ToCpu::filled(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  if (!how_.share) return made(tensor);
  if (!how_.shrink) return on_same_storage(tensor);
  for (const auto& [theirs, copy] : known_) {
    if (theirs.scalar_type() == tensor.scalar_type() && theirs.sizes() == tensor.sizes() &&
        at::get_overlap_status(theirs, tensor) == at::MemOverlapStatus::Full) {
      return copy;
    }
  }
  known_.emplace_back(tensor, made(tensor));
  return known_.back().second;
}

IValue ToCpu::operator()(const IValue& value, ArgKind kind) {
  if (how_.shrink_integers && (value.isIntList() || value.isInt())) return shrunk(value);
  if (kind == ArgKind::kGenerator) return at::make_generator<at::CPUGeneratorImpl>();
  return with_tensors(value, kind, c10::DeviceType::CPU,
                      [this](const at::Tensor& tensor) { return filled(tensor); });
}

IValue ToCpu::shrunk(const IValue& value) const {
  const bool is_list = value.isIntList();
  std::vector<int64_t> sizes = is_list ? value.toIntVector() : std::vector{value.toInt()};
  shrink(sizes);
  return is_list ? IValue(sizes) : IValue(sizes[0]);
}

bool draws_from_default(const OpInfo& info) {
  return info.random && std::none_of(info.args.begin(), info.args.end(), [](const ArgInfo& arg) {
           return arg.kind == ArgKind::kGenerator;
         });
}

// The numbers that were checked.
auto& checked_numbers = *new KnownCalls();
// The calls that no kernel warns of.
auto& quiet_calls = *new KnownCalls();

// Of a call with these numbers, given the hash of the scan's key.
uint64_t hash_with_numbers(const Scan& scan, uint64_t key_hash) {
  static_assert(sizeof(ir::ScalarValue) == sizeof(uint64_t));
  const auto* words = reinterpret_cast<const uint64_t*>(scan.slots.data());
  return hash_words(words, scan.slots.size()) * 0x9e3779b97f4a7c15ull ^ key_hash;
}

bool takes_integers(const Scan& scan) {
  for (const c10::TensorImpl* tensor : scan.operands) {
    if (c10::isIntegralType(c10::typeMetaToScalarType(tensor->dtype()), /*includeBool=*/false)) {
      return true;
    }
  }
  return false;
}

bool has_empty(c10::ArrayRef<const c10::TensorImpl*> operands) {
  return std::any_of(operands.begin(), operands.end(),
                     [](const c10::TensorImpl* x) { return x->numel() == 0; });
}

auto& argument_checks = *new std::unordered_map<std::string, Checks>();

}  // namespace

void set_argument_checks(std::unordered_map<std::string, Checks> checks) {
  argument_checks = std::move(checks);
}

void find_checks(OpInfo& info) {
  const std::string& name = info.functional_name;
  const auto found = argument_checks.find(name);
  if (found != argument_checks.end()) info.checks = found->second;
  Checks& checks = info.checks;
  // The kernels on lists call those on their elements, but for the one that may take from the CPU.
  const bool of_elements = info.functional.hasTag(at::Tag::pointwise) ||
                           (name.starts_with("aten::_foreach_") && name != "aten::_foreach_copy");
  if (!checks.on_cpu_with && of_elements) checks.on_cpu_with = 1;
  if (checks.on_cpu_with && checks.numbers == Checks::kNever) checks.numbers = Checks::kOfIntegers;
}

std::vector<at::Tensor> device_tensors(const OpInfo& info, Args args) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgKind kind = info.args[i].kind;
    if (kind == ArgKind::kTensor || kind == ArgKind::kTensorList) flatten(args[i], tensors);
  }
  std::erase_if(tensors, [](const at::Tensor& x) { return !x.defined() || x.is_cpu(); });
  return tensors;
}

std::vector<at::Tensor> check_as_cpu(const OpInfo& info, Args args, const CpuCall& how) {
  if (draws_from_default(info)) return {};
  PlainScope plain;
  KeptWarnings silence;  // what the kernel says of such tensors is not about the user's data
  ToCpu to_cpu(info, args, how);
  std::vector<IValue> stack;
  for (size_t i = 0; i < args.size(); ++i) {
    stack.push_back(info.args[i].is_dtype ? args[i] : to_cpu(args[i], info.args[i].kind));
  }
  info.handle.callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const IValue& value : stack) flatten(value, results);
  return results;
}

bool can_ask_cpu(const OpInfo& info, const Scan& scan) {
  const auto is_large = [](const c10::TensorImpl* x) { return x->numel() > kLarge; };
  if (std::any_of(scan.written.begin(), scan.written.end(), is_large)) return false;
  return !is_backward(info) || !has_empty(scan.operands);
}

void check_static(const OpInfo& info, Args args) {
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& name = info.handle.schema().arguments()[i].name();
    TORCH_CHECK(!args[i].isSymIntList(), name, " of ", info.name,
                ": expected to contain only concrete integers, none below -2**62");
    if (!info.factory) continue;
    if (name == "pin_memory" && args[i].isBool()) {
      TORCH_CHECK(!args[i].toBool(), "Only dense CPU tensors can be pinned");
    } else if (name == "layout" && args[i].isInt()) {
      auto layout = static_cast<c10::Layout>(args[i].toInt());
      TORCH_CHECK_NOT_IMPLEMENTED(layout == c10::Layout::Strided, "lazyxla: tensors of layout ",
                                  layout, " do not exist on this device");
    }
  }
}

void check_small(const OpInfo& info, Args args, const Scan& scan, const Inference& inference) {
  constexpr int64_t kFew = 1 << 12;  // the most elements that a factory may make
  int64_t elements = 0;
  for (const c10::TensorImpl* operand : scan.operands) elements += operand->numel();
  for (const auto& result : inference.results) {
    if (result.defined) elements += c10::multiply_integers(result.geometry.sizes);
  }
  // This operator checks the values of its pivots.
  bool of_values = info.functional_name == "aten::linalg_ldl_solve";
  bool small = info.factory ? elements <= kFew : has_empty(scan.operands) && elements <= kLarge;
  if (!small || of_values || !can_ask_cpu(info, scan)) return;
  try {
    // Zeros are valid indices, lengths and offsets if any value is.
    check_as_cpu(info, args, {.fill = info.checks.on_cpu_with.value_or(0)});
  } catch (const c10::NotImplementedError&) {
    // The CPU has no kernel for this dtype; XLA may still support it.
  }
}

void check_numbers(const OpInfo& info, Args args, const Scan& scan, uint64_t key_hash) {
  if (info.checks.numbers == Checks::kNever) return;
  // Numbers without slots (complex ones) are part of the key, but inference ignores them.
  bool always = info.checks.numbers == Checks::kAlways;
  if (!always && (scan.slots.empty() || !takes_integers(scan))) return;
  const uint64_t hash = hash_with_numbers(scan, key_hash);
  if (checked_numbers.contains(hash)) return;
  if (info.checks.of_numbers) {
    info.checks.of_numbers(info, args, {});
  } else {
    check_as_cpu(info, args, {.fill = info.checks.on_cpu_with.value_or(0), .shrink = true});
  }
  checked_numbers.add(hash);
}

void check_deterministic(const OpInfo& info, Args args) {
  if (!at::globalContext().deterministicAlgorithms()) return;
  // What PyTorch's CPU alerts to, whatever the kernel here does, and by which name.
  static const std::map<std::string_view, const char*> callers = {
      {"aten::max_unpool2d", "max_unpooling2d_forward_out"},
      {"aten::max_unpool3d", "max_unpooling3d_forward_out"},
      {"aten::put", "put_"},
  };
  const auto found = callers.find(info.functional_name);
  if (found == callers.end()) return;
  const auto& arguments = info.handle.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i) {  // sums have the same order each time
    if (arguments[i].name() == "accumulate" && args[i].toBool()) return;
  }
  at::globalContext().alertNotDeterministic(found->second);
}

void give_warnings(const OpInfo& info, Args args, const Scan& scan, uint64_t key_hash) {
  if (!info.checks.warnings) return;
  const uint64_t hash = hash_with_numbers(scan, key_hash);
  if (quiet_calls.contains(hash)) return;
  const std::vector<std::string> warnings = info.checks.warnings(info, args);
  if (warnings.empty()) quiet_calls.add(hash);
  for (const std::string& warning : warnings) TORCH_WARN(warning);
}

}  // namespace lazyxla::dispatch
