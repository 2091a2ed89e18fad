#include "dispatch/checks.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "dispatch/plain_call.h"
#include "dispatch/tensor.h"
#include "ir/shape_memo.h"
#include "ir/spin_lock.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using Args = c10::ArrayRef<IValue>;

// Tensors with more elements are not made on the CPU for the sake of an error message.
constexpr int64_t kLarge = 1 << 22;

bool is_tensor(const IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// The argument with CPU tensors for tensors, filled with `fill`: what to_meta is to the meta
// device.
IValue to_cpu(const IValue& value, ArgKind kind, int fill, bool shrink) {
  auto filled = [fill, shrink](const IValue& element) {
    if (!is_tensor(element) || element.toTensor().is_cpu()) return element;
    const at::Tensor tensor = element.toTensor();
    std::vector<int64_t> sizes = tensor.sizes().vec();
    for (int64_t& size : sizes) size = shrink ? std::min<int64_t>(size, 2) : size;
    auto options = c10::TensorOptions().dtype(tensor.scalar_type());
    // Elements that share their memory take none; only writing forms mind.
    bool spread = !shrink && tensor.numel() > kLarge;
    at::Tensor made =
        spread ? at::full({}, fill, options).expand(sizes) : at::full(sizes, fill, options);
    return IValue(std::move(made));
  };
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

// The numbers that were checked, by hash: a hash says nothing of the call, but two calls of one
// hash do not happen.
class CheckedNumbers {
 public:
  static CheckedNumbers& get() {
    static auto* instance = new CheckedNumbers();
    return *instance;
  }
  bool contains(uint64_t hash) {
    std::lock_guard lock(mutex_);
    return hashes_.count(hash) > 0;
  }
  void add(uint64_t hash) {
    std::lock_guard lock(mutex_);
    if (hashes_.size() >= kMost) hashes_.clear();
    hashes_.insert(hash);
  }

 private:
  static constexpr size_t kMost = 1 << 14;
  ir::SpinLock mutex_;
  ska::flat_hash_set<uint64_t> hashes_;
};

bool takes_integers(const Scan& scan) {
  for (const c10::TensorImpl* tensor : scan.operands) {
    if (c10::isIntegralType(c10::typeMetaToScalarType(tensor->dtype()), /*includeBool=*/false)) {
      return true;
    }
  }
  return false;
}

// ---- checks that need all of the sizes ----

const IValue& argument(const OpInfo& info, Args args, const char* name) {
  return args[*info.handle.schema().argumentIndexWithName(name)];
}

bool any_below(const IValue& list, int64_t bound) {
  for (int64_t value : list.toIntVector()) {
    if (value < bound) return true;
  }
  return false;
}

void check_convolution(const OpInfo& info, Args args) {
  TORCH_CHECK(!any_below(argument(info, args, "padding"), 0), "negative padding is not supported");
  TORCH_CHECK(!any_below(argument(info, args, "output_padding"), 0),
              "negative output_padding is not supported");
  TORCH_CHECK(!any_below(argument(info, args, "stride"), 1),
              "non-positive stride is not supported");
  TORCH_CHECK(!any_below(argument(info, args, "dilation"), 1),
              "dilation should be greater than zero");
}

void check_multinomial(const OpInfo& info, Args args) {
  constexpr int64_t kMostCategories = 1 << 24;  // what float32 counts
  const at::Tensor& weights = args[0].toTensor();
  int64_t samples = args[1].toInt();
  if (auto out = info.handle.schema().argumentIndexWithName("out")) {
    c10::ScalarType dtype = args[*out].toTensor().scalar_type();
    TORCH_CHECK(dtype == c10::ScalarType::Long,
                "multinomial expects Long tensor out, got: ", dtype);
  }
  TORCH_CHECK(weights.dim() == 1 || weights.dim() == 2, "prob_dist must be 1 or 2 dim");
  TORCH_CHECK(
      weights.is_floating_point(),
      "multinomial only supports floating-point dtypes for input, got: ", weights.scalar_type());
  TORCH_CHECK(samples > 0, "cannot sample n_sample <= 0 samples");
  TORCH_CHECK(argument(info, args, "replacement").toBool() || samples <= weights.size(-1),
              "cannot sample n_sample > prob_dist.size(-1) samples without replacement");
  TORCH_CHECK(weights.size(-1) <= kMostCategories, "number of categories cannot exceed 2^24");
}

void check_randperm(const OpInfo& info, Args args) {
  const IValue& dtype = argument(info, args, "dtype");
  if (!dtype.isInt()) return;
  auto options = c10::TensorOptions().dtype(dtype.toScalarType());
  at::native::check_supported_max_int_with_precision(args[0].toInt(), at::empty({0}, options));
}

// Throws if the dtype that a factory is to fill a tensor with cannot hold the number.
void check_full(const OpInfo& info, Args args) {
  const char* name = info.functional_name == "aten::full" ? "fill_value" : "s";
  if (!info.handle.schema().argumentIndexWithName("dtype")) return;  // the out= form
  const IValue& dtype = argument(info, args, "dtype");
  if (!dtype.isInt()) return;
  c10::Scalar value = argument(info, args, name).toScalar();
  auto check = [&value]<typename T>(T) { value.to<T>(); };
  switch (dtype.toScalarType()) {
#define LAZYXLA_CASE(ctype, dtype) \
  case c10::ScalarType::dtype:     \
    return check(ctype());
    AT_FORALL_SCALAR_TYPES_AND2(Half, BFloat16, LAZYXLA_CASE)
    LAZYXLA_CASE(c10::Float8_e5m2, Float8_e5m2)
    LAZYXLA_CASE(c10::Float8_e4m3fn, Float8_e4m3fn)
    LAZYXLA_CASE(c10::Float8_e5m2fnuz, Float8_e5m2fnuz)
    LAZYXLA_CASE(c10::Float8_e4m3fnuz, Float8_e4m3fnuz)
#undef LAZYXLA_CASE
    default:
      return;
  }
}

// Throws if the dtype of a tensor cannot hold the number that it is to be padded with. The CPU
// kernel says so itself, but cannot crop what to_cpu shrank.
void check_pad(const OpInfo& info, Args args) {
  const at::Tensor& self = args[0].toTensor();
  auto pad = argument(info, args, "pad").toIntVector();
  if (std::all_of(pad.begin(), pad.end(), [](int64_t size) { return size == 0; })) return;
  PlainScope plain;
  at::full({2}, argument(info, args, "value").toScalar(), at::dtype(self.scalar_type()));
}

// What tensor options a factory function cannot have here.
void check_options(const OpInfo& info, Args args) {
  const auto& schema = info.handle.schema().arguments();
  for (size_t i = 0; info.factory && i < args.size(); ++i) {
    if (schema[i].name() == "pin_memory" && args[i].isBool()) {
      TORCH_CHECK(!args[i].toBool(), "Only dense CPU tensors can be pinned");
    } else if (schema[i].name() == "layout" && args[i].isInt()) {
      auto layout = static_cast<c10::Layout>(args[i].toInt());
      TORCH_CHECK_NOT_IMPLEMENTED(layout == c10::Layout::Strided, "lazyxla: tensors of layout ",
                                  layout, " do not exist on this device");
    }
  }
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
      "aten::fill.Scalar",
      "aten::constant_pad_nd",
      "aten::full_like",
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
  };
  if (names.count(name)) return Checks::kAlways;
  bool as_pointwise = name == "aten::_foreach_pow.Scalar";
  return asks_cpu || as_pointwise ? Checks::kOfIntegers : Checks::kNever;
}

// What is checked here, where the CPU's kernel cannot tell from little data.
struct OwnChecks {
  Checks::Check of_static = nullptr, of_numbers = nullptr;
};

OwnChecks own_checks(const std::string& name) {
  static const auto& checks = *new const std::unordered_map<std::string, OwnChecks>{
      {"aten::convolution", {.of_static = check_convolution}},
      {"aten::full", {.of_static = check_full}},
      {"aten::scalar_tensor", {.of_static = check_full}},
      {"aten::multinomial", {.of_static = check_multinomial}},
      {"aten::randperm", {.of_static = check_randperm}},
      {"aten::randperm.generator", {.of_static = check_randperm}},
      {"aten::constant_pad_nd", {.of_numbers = check_pad}},
  };
  auto found = checks.find(name);
  return found == checks.end() ? OwnChecks() : found->second;
}

}  // namespace

void find_checks(OpInfo& info) {
  const OwnChecks own = own_checks(info.functional_name);
  info.checks.on_cpu_with = on_cpu_with(info.functional, info.functional_name);
  info.checks.of_static = own.of_static;
  info.checks.numbers = numbers_of(info.functional_name, info.checks.on_cpu_with.has_value());
  info.checks.of_numbers = own.of_numbers;
}

void check_as_cpu(const OpInfo& info, Args args, int fill, bool shrink) {
  PlainScope plain;
  KeepRandomState keep(info.random);
  std::vector<IValue> stack;
  for (size_t i = 0; i < args.size(); ++i) {
    stack.push_back(to_cpu(args[i], info.args[i].kind, fill, shrink));
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
  if (info.checks.of_static) info.checks.of_static(info, args);
}

void check_numbers(const OpInfo& info, Args args, const Scan& scan, uint64_t key_hash) {
  if (info.checks.numbers == Checks::kNever || scan.slots.empty()) return;
  if (info.checks.numbers == Checks::kOfIntegers && !takes_integers(scan)) return;
  static_assert(sizeof(ir::ScalarValue) == sizeof(uint64_t));
  const auto* words = reinterpret_cast<const uint64_t*>(scan.slots.data());
  uint64_t hash = ir::hash_words(words, scan.slots.size()) * 0x9e3779b97f4a7c15ull ^ key_hash;
  if (CheckedNumbers::get().contains(hash)) return;
  if (info.checks.of_numbers) {
    info.checks.of_numbers(info, args);
  } else {
    check_as_cpu(info, args, info.checks.on_cpu_with.value_or(0), /*shrink=*/true);
  }
  CheckedNumbers::get().add(hash);
}

}  // namespace lazyxla::dispatch
