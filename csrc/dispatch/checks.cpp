#include "dispatch/checks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "common/hash.h"
#include "dispatch/copies.h"
#include "dispatch/known_calls.h"
#include "dispatch/own_checks.h"
#include "dispatch/plain_call.h"
#include "dispatch/tensor.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using Args = c10::ArrayRef<IValue>;

// Tensors with more elements are not made on the CPU for the sake of an error message.
constexpr int64_t kLarge = 1 << 22;

// Arguments with CPU tensors for tensors: what to_meta is to the meta device.
class ToCpu {
 public:
  ToCpu(const OpInfo& info, Args args, const CpuCall& how) : how_(how) {
    if (how.shrink) find_sizes(info, args);
  }
  IValue operator()(const IValue& value, ArgKind kind);

 private:
  void find_sizes(const OpInfo& info, Args args);
  IValue filled(const IValue& element);
  at::Tensor made(const at::Tensor& tensor);
  at::Tensor on_same_storage(const at::Tensor& tensor);

  const CpuCall how_;
  std::map<int64_t, int64_t> small_;                      // what becomes of large sizes
  std::vector<std::pair<at::Tensor, at::Tensor>> known_;  // with those that share memory
  std::map<std::pair<const c10::StorageImpl*, c10::ScalarType>, at::Tensor> storages_;
};

// Sizes that are equal stay equal, and the larger of two stays the larger, so that kernels which
// compare them find what they would have found.
void ToCpu::find_sizes(const OpInfo& info, Args args) {
  constexpr int64_t kSmall = 4096, kKept = 4;
  int64_t elements = 0;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgKind kind = info.args[i].kind;
    if (kind == ArgKind::kTensor || kind == ArgKind::kTensorList) flatten(args[i], tensors);
  }
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.is_cpu()) continue;
    elements += tensor.numel();
    for (int64_t size : tensor.sizes()) {
      if (size > kKept) small_[size] = 0;
    }
  }
  int64_t next = kKept;
  for (auto& [size, smaller] : small_) smaller = ++next;
  if (elements <= kSmall) small_.clear();
}

at::Tensor ToCpu::made(const at::Tensor& tensor) {
  if (how_.real) return to_host(tensor);
  std::vector<int64_t> sizes = tensor.sizes().vec();
  for (int64_t& size : sizes) {
    if (auto found = small_.find(size); found != small_.end()) size = found->second;
  }
  auto options = c10::TensorOptions().dtype(tensor.scalar_type());
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

IValue ToCpu::filled(const IValue& element) {
  if (!is_tensor(element) || element.toTensor().is_cpu()) return element;
  const at::Tensor tensor = element.toTensor();
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
  switch (kind) {
    case ArgKind::kTensor:
      return filled(value);
    case ArgKind::kTensorList: {
      if (value.isNone()) return value;
      c10::List<at::Tensor> tensors;
      c10::List<std::optional<at::Tensor>> optionals;
      for (const IValue& element : value.toListRef()) {
        IValue copy = filled(element);
        tensors.push_back(copy.isTensor() ? copy.toTensor() : at::Tensor());
        optionals.push_back(copy.isTensor() ? std::optional(copy.toTensor()) : std::nullopt);
      }
      return value.isTensorList() ? IValue(tensors) : IValue(optionals);
    }
    case ArgKind::kGenerator:
      return IValue();
    case ArgKind::kDevice:
      return IValue(c10::Device(c10::DeviceType::CPU));
    default:
      return value;
  }
}

// Leaves the CPU's default generator as it was.
class KeepRandomState {
 public:
  explicit KeepRandomState(bool random) {
    if (!random) return;
    generator_ = at::detail::getDefaultCPUGenerator();
    std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeepRandomState() {
    if (!state_.defined()) return;
    std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeepRandomState(const KeepRandomState&) = delete;
  KeepRandomState& operator=(const KeepRandomState&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

// The numbers that were checked.
KnownCalls& checked_numbers() {
  static auto* instance = new KnownCalls();
  return *instance;
}

bool takes_integers(const Scan& scan) {
  for (const c10::TensorImpl* tensor : scan.operands) {
    if (c10::isIntegralType(c10::typeMetaToScalarType(tensor->dtype()), /*includeBool=*/false)) {
      return true;
    }
  }
  return false;
}

// ---- which operator has which checks ----

// For operators whose argument checks do not depend on sizes, so that one element tells: the value
// of that element. Pointwise operators may divide by it, others index with it.
std::optional<int> on_cpu_with(const c10::OperatorHandle& functional, const std::string& name) {
  static const auto& names = *new const std::unordered_set<std::string>{
      "aten::mm",
      "aten::bmm",
      "aten::addmm",
      "aten::baddbmm",
      "aten::mv",
      "aten::dot",
      "aten::_softmax",
      "aten::_log_softmax",
      "aten::nll_loss_forward",
      "aten::nll_loss2d_forward",
      "aten::sort",
      "aten::sort.stable",
      "aten::max",
      "aten::min",
      "aten::amax",
      "aten::amin",
      "aten::max.dim",
      "aten::min.dim",
      "aten::sum",
      "aten::all",
      "aten::all.dim",
      "aten::all.dims",
      "aten::any",
      "aten::any.dim",
      "aten::any.dims",
      "aten::index_fill.int_Tensor",
      "aten::argmax",
      "aten::argmin",
      "aten::mean.dim",
      "aten::gather",
      "aten::index_select",
      "aten::scatter_add",
      "aten::sum.dim_IntList",
      "aten::bucketize.Tensor",
      "aten::complex",
      "aten::index_add",
      "aten::masked_scatter",
      "aten::uniform",
      "aten::normal_functional",
      "aten::normal.Tensor_float",
      "aten::normal.float_Tensor",
      "aten::normal.Tensor_Tensor",
      "aten::random",
      "aten::random.from",
      "aten::random.to",
      "aten::binomial",
      "aten::poisson",
      "aten::bernoulli",
      "aten::bernoulli.Tensor",
      "aten::bernoulli.p",
      "aten::aminmax",
      "aten::addr",
      "aten::polar",
      "aten::logcumsumexp",
      "aten::mode",
  };
  static const auto& divisions = *new const std::unordered_set<std::string>{
      "aten::floor_divide",
      "aten::floor_divide.Scalar",
  };
  if (names.count(name)) return 0;
  if (divisions.count(name)) return 1;
  for (at::Tag tag : functional.getTags()) {
    if (tag == at::Tag::pointwise) return 1;
  }
  return std::nullopt;
}

// Operators whose kernels have conditions on their numbers, whatever the dtypes: the parameters of
// distributions and norms, and values to be stored, which a dtype may be too narrow for. The
// pointwise ones among the others have conditions for integers only, which cannot hold every
// number, be divided by zero or raised to a negative power.
Checks::When numbers_of(const std::string& name, bool asks_cpu) {
  static const auto& names = *new const std::unordered_set<std::string>{
      "aten::cauchy",
      "aten::exponential",
      "aten::geometric",
      "aten::log_normal",
      "aten::uniform",
      "aten::normal_functional",
      "aten::normal.Tensor_float",
      "aten::bernoulli.p",
      "aten::native_dropout",
      "aten::random.from",
      "aten::random.to",
      "aten::full",
      "aten::scalar_tensor",
      "aten::linspace",
      "aten::logspace",
      "aten::fill.Scalar",
      "aten::constant_pad_nd",
      "aten::full_like",
      "aten::new_full",
      "aten::fill_diagonal",
      "aten::masked_fill.Scalar",
      "aten::index_fill.int_Scalar",
      "aten::scatter.value",
      "aten::renorm",
      "aten::_cdist_forward",
      "aten::huber_loss",
      "aten::smooth_l1_loss",
      "aten::softshrink",
      "aten::histc",
      "aten::celu",
      // From the result alone the gradient is not known if the slope is negative.
      "aten::elu_backward",
      "aten::leaky_relu_backward",
      "aten::rrelu_with_noise_backward",
      "aten::linalg_vector_norm",
      "aten::norm.ScalarOpt_dim",
  };
  if (names.count(name)) return Checks::kAlways;
  bool as_pointwise = name == "aten::_foreach_pow.Scalar";
  return asks_cpu || as_pointwise ? Checks::kOfIntegers : Checks::kNever;
}

}  // namespace

void find_checks(OpInfo& info) {
  const OwnChecks own = own_checks(info.functional_name);
  info.checks.on_cpu_with = on_cpu_with(info.functional, info.functional_name);
  info.checks.of_static = own.of_static;
  info.checks.numbers = numbers_of(info.functional_name, info.checks.on_cpu_with.has_value());
  info.checks.of_numbers = own.of_numbers;
}

void check_as_cpu(const OpInfo& info, Args args, const CpuCall& how) {
  PlainScope plain;
  KeepRandomState keep(info.random);
  ToCpu to_cpu(info, args, how);
  std::vector<IValue> stack;
  for (size_t i = 0; i < args.size(); ++i) {
    stack.push_back(to_cpu(args[i], info.args[i].kind));
  }
  info.handle.callBoxed(&stack);
}

bool affordable_on_cpu(const Scan& scan) {
  for (const c10::TensorImpl* tensor : scan.written) {
    if (tensor->numel() > kLarge) return false;
  }
  return true;
}

void check_static(const OpInfo& info, Args args) {
  check_options(info, args);
  check_lists(info, args);
  if (info.checks.of_static) info.checks.of_static(info, args);
}

void check_small(const OpInfo& info, Args args, const Scan& scan, const Inference& inference) {
  constexpr int64_t kFew = 1 << 12;  // what a factory is let make
  bool empty = false;
  int64_t elements = 0;
  for (const c10::TensorImpl* operand : scan.operands) {
    empty = empty || operand->numel() == 0;
    elements += operand->numel();
  }
  for (const auto& result : inference.results) {
    if (result.defined) elements += c10::multiply_integers(result.geometry.sizes);
  }
  // What this one checks of its pivots are their values.
  bool of_values = info.functional_name == "aten::linalg_ldl_solve";
  bool small = info.factory ? elements <= kFew : empty && elements <= kLarge;
  if (!small || of_values) return;
  try {
    // Zeros are indices, lengths and offsets that are right if any are.
    check_as_cpu(info, args, {.fill = info.checks.on_cpu_with.value_or(0)});
  } catch (const c10::NotImplementedError&) {
    // The CPU has no kernel for this dtype; XLA may well have one.
  }
}

void check_numbers(const OpInfo& info, Args args, const Scan& scan, uint64_t key_hash) {
  if (info.checks.numbers == Checks::kNever) return;
  // Numbers that are no slots (complex ones) are part of the key, but not of what is inferred.
  bool always = info.checks.numbers == Checks::kAlways;
  if (!always && (scan.slots.empty() || !takes_integers(scan))) return;
  static_assert(sizeof(ir::ScalarValue) == sizeof(uint64_t));
  const auto* words = reinterpret_cast<const uint64_t*>(scan.slots.data());
  uint64_t hash = hash_words(words, scan.slots.size()) * 0x9e3779b97f4a7c15ull ^ key_hash;
  if (checked_numbers().contains(hash)) return;
  if (info.checks.of_numbers) {
    info.checks.of_numbers(info, args);
  } else {
    check_as_cpu(info, args, {.fill = info.checks.on_cpu_with.value_or(0), .shrink = true});
  }
  checked_numbers().add(hash);
}

}  // namespace lazyxla::dispatch
