#include "dispatch/own_checks.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/ConvUtils.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/index.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <c10/core/DefaultDtype.h>

#include <algorithm>
#include <sstream>
#include <unordered_map>

#include "dispatch/plain_call.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using Args = c10::ArrayRef<IValue>;

// The argument of that name, or none if this form of the operator lacks it.
const IValue& argument(const OpInfo& info, Args args, const char* name) {
  static const auto* none = new IValue();
  auto position = info.handle.schema().argumentIndexWithName(name);
  return position ? args[*position] : *none;
}

// The element type that a factory was asked for, by its dtype or by the tensor that it is to fill.
std::optional<c10::ScalarType> requested_dtype(const OpInfo& info, Args args) {
  if (const IValue& dtype = argument(info, args, "dtype"); dtype.isInt()) {
    return dtype.toScalarType();
  }
  if (const IValue& out = argument(info, args, "out"); out.isTensor()) {
    return out.toTensor().scalar_type();
  }
  return std::nullopt;
}

// A tensor on the CPU of those sizes that takes no memory.
at::Tensor without_memory(const at::Tensor& tensor) {
  return at::zeros({}, at::dtype(tensor.scalar_type())).expand(tensor.sizes());
}

bool is_list(const c10::Argument& argument, const c10::IValue& value) {
  return value.isIntList() && argument.type()->kind() == c10::TypeKind::ListType;
}

// The windows of PyTorch's kernels are counted in 32 bits.
void check_windows(const OpInfo& info, Args args) {
  const auto& schema = info.handle.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i) {
    if (!is_list(schema[i], args[i])) continue;
    for (int64_t number : args[i].toIntVector()) {
      TORCH_CHECK(number == static_cast<int>(number), schema[i].name(), " of ", info.name,
                  ": value cannot be converted to type int without overflow: ", number);
    }
  }
}

// Which dtypes but floats can be resampled, the CPU's kernels say: asked with a single element.
void check_upsampling(const OpInfo& info, Args args) {
  const at::Tensor& input = args[0].toTensor();
  if (input.is_floating_point()) return;
  const auto& schema = info.handle.schema().arguments();
  std::vector<IValue> stack;
  for (size_t i = 0; i < args.size(); ++i) {
    const bool is_size = schema[i].name() == "output_size";
    if (is_size) {
      stack.emplace_back(std::vector<int64_t>(args[i].toIntVector().size(), 2));
    } else if (args[i].isTensor()) {
      const at::Tensor& tensor = args[i].toTensor();
      stack.emplace_back(
          at::zeros(std::vector<int64_t>(input.dim(), 1), at::dtype(tensor.scalar_type())));
    } else {
      stack.push_back(schema[i].name().starts_with("scales") ? IValue() : args[i]);
    }
  }
  PlainScope plain;
  info.handle.callBoxed(&stack);
}

void check_fractional_windows(const OpInfo& info, Args args) {
  for (int64_t size : argument(info, args, "kernel_size").toIntVector()) {
    TORCH_CHECK(size > 0, info.name, ": a window of size ", size, " has no greatest element");
  }
}

// PyTorch checks shapes where it chooses the library that computes a convolution.
void check_convolution(const OpInfo& info, Args args) {
  const at::Tensor& input = args[0].toTensor();
  const at::Tensor& weight = args[1].toTensor();
  const IValue& bias = args[2];
  const bool has_bias = bias.isTensor() && bias.toTensor().defined();
  TORCH_CHECK(weight.dim() > 2, "weight should have at least three dimensions");
  auto ints = [&](const char* name) { return argument(info, args, name).toIntVector(); };
  {
    PlainScope plain;
    const auto stride = ints("stride"), padding = ints("padding"), dilation = ints("dilation"),
               output_padding = ints("output_padding");
    at::native::select_conv_backend(
        without_memory(input), without_memory(weight),
        has_bias ? std::optional(without_memory(bias.toTensor())) : std::nullopt,
        c10::fromIntArrayRefSlow(stride), c10::fromIntArrayRefSlow(padding),
        c10::fromIntArrayRefSlow(dilation), argument(info, args, "transposed").toBool(),
        c10::fromIntArrayRefSlow(output_padding), argument(info, args, "groups").toInt(),
        std::nullopt);
    for (size_t i = 0; argument(info, args, "transposed").toBool() && i < stride.size(); ++i) {
      TORCH_CHECK(output_padding[i] < stride[i] || output_padding[i] < dilation[i],
                  "output padding must be smaller than either stride or dilation, but got "
                  "output_padding: ",
                  output_padding, " stride: ", stride, " dilation: ", dilation);
    }
  }
  for (const at::Tensor& other : {weight, has_bias ? bias.toTensor() : weight}) {
    TORCH_CHECK(other.scalar_type() == input.scalar_type(), "expected scalar type ",
                input.scalar_type(), " but found ", other.scalar_type());
  }
}

// Throws if index tensors do not broadcast with each other.
void check_indices_broadcast(const IValue& indices) {
  std::ostringstream shapes;
  std::vector<int64_t> common;
  bool fit = true;
  for (const IValue& index : indices.toListRef()) {
    if (!index.isTensor() || !index.toTensor().defined()) continue;
    const at::IntArrayRef sizes = index.toTensor().sizes();
    shapes << (shapes.tellp() == 0 ? "" : ", ") << sizes;
    const size_t rank = std::max(common.size(), sizes.size());
    common.insert(common.begin(), rank - common.size(), 1);
    for (size_t i = 0; i < sizes.size(); ++i) {
      int64_t& size = common[rank - sizes.size() + i];
      fit &= size == sizes[i] || size == 1 || sizes[i] == 1;
      if (size == 1) size = sizes[i];
    }
  }
  TORCH_CHECK_INDEX(fit,
                    "shape mismatch: indexing tensors could not be broadcast together with shapes ",
                    shapes.str());
}

// Throws if indices that select elements do not fit the tensor, or values of these sizes not what
// they select.
void check_indexed(const at::Tensor& self, const IValue& indices, at::IntArrayRef sizes) {
  check_indices_broadcast(indices);
  auto meta = [](const at::Tensor& tensor) {
    return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  };
  c10::List<std::optional<at::Tensor>> selecting;
  for (const IValue& index : indices.toListRef()) {
    bool given = index.isTensor() && index.toTensor().defined();
    selecting.push_back(given ? std::optional(meta(index.toTensor())) : std::nullopt);
  }
  PlainScope plain;
  const at::Tensor selected = at::index(meta(self), selecting);
  TORCH_CHECK(at::is_expandable_to(sizes, selected.sizes()),
              "shape mismatch: value tensor of shape ", sizes,
              " cannot be broadcast to indexing result of shape ", selected.sizes());
}

void check_index_put(const OpInfo&, Args args) {
  const at::Tensor& self = args[0].toTensor();
  const at::Tensor& values = args[2].toTensor();
  TORCH_CHECK(self.scalar_type() == values.scalar_type(),
              "Index put requires the source and destination dtypes match, got ",
              self.scalar_type(), " for the destination and ", values.scalar_type(),
              " for the source.");
  check_indexed(self, args[1], values.sizes());
}

void check_masked_index_put(const OpInfo&, Args args) {
  const at::Tensor& self = args[0].toTensor();
  if (self.numel() == 0) return;
  const at::Tensor& mask = args[1].toTensor();
  check_indexed(self, args[2], at::infer_size(args[3].toTensor().sizes(), mask.sizes()));
}

void check_put(const OpInfo&, Args args) {
  const at::Tensor& self = args[0].toTensor();
  const at::Tensor& index = args[1].toTensor();
  const at::Tensor& source = args[2].toTensor();
  TORCH_CHECK_INDEX(source.numel() == index.numel(),
                    "put_(): Expected source and index to have the same number of elements, but "
                    "got source.numel() = ",
                    source.numel(), ", index.numel() = ", index.numel());
  TORCH_CHECK(index.scalar_type() == c10::ScalarType::Long,
              "put_(): Expected a long tensor for index, but got ", index.scalar_type());
  TORCH_CHECK(self.scalar_type() == source.scalar_type(),
              "put_(): self and source expected to have the same dtype, but got self.dtype = ",
              self.scalar_type(), " and source.dtype = ", source.scalar_type());
  TORCH_CHECK_INDEX(source.numel() == 0 || self.numel() != 0,
                    "put_(): Expected self to have elements, but it has none");
}

void check_multinomial(const OpInfo& info, Args args) {
  constexpr int64_t kMostCategories = 1 << 24;  // what float32 counts
  const at::Tensor& weights = args[0].toTensor();
  int64_t samples = args[1].toInt();
  if (const IValue& out = argument(info, args, "out"); out.isTensor()) {
    c10::ScalarType dtype = out.toTensor().scalar_type();
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
  const auto dtype = requested_dtype(info, args);
  if (!dtype) return;
  at::native::check_supported_max_int_with_precision(args[0].toInt(),
                                                     at::empty({0}, at::dtype(*dtype)));
}

// Throws if an element type cannot hold the number.
void check_holds(c10::ScalarType dtype, const c10::Scalar& value) {
  auto check = [&value]<typename T>(T) { value.to<T>(); };
  switch (dtype) {
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

void check_full(const OpInfo& info, Args args) {
  const bool scalar_tensor = info.functional_name == "aten::scalar_tensor";
  const c10::Scalar value = argument(info, args, scalar_tensor ? "s" : "fill_value").toScalar();
  if (const auto dtype = requested_dtype(info, args)) check_holds(*dtype, value);
}

// The bounds of a range of no or one element are not all looked at.
void check_linspace(const OpInfo& info, Args args) {
  const int64_t steps = argument(info, args, "steps").toInt();
  const c10::Scalar start = argument(info, args, "start").toScalar();
  const c10::Scalar end = argument(info, args, "end").toScalar();
  const auto dtype = requested_dtype(info, args).value_or(c10::get_default_dtype_as_scalartype());
  if (steps <= 0 || start.isComplex() || end.isComplex()) return;
  check_holds(dtype, start);
  if (steps > 1) check_holds(dtype, end);
}

void check_new_full(const OpInfo& info, Args args) {
  const auto dtype = requested_dtype(info, args).value_or(args[0].toTensor().scalar_type());
  check_holds(dtype, argument(info, args, "fill_value").toScalar());
}

// Throws if the dtype of a tensor cannot hold the number that it is to be padded with. The CPU
// kernel says so itself, but cannot crop a tensor that was shrunk.
void check_pad(const OpInfo& info, Args args) {
  const at::Tensor& self = args[0].toTensor();
  auto pad = argument(info, args, "pad").toIntVector();
  if (std::all_of(pad.begin(), pad.end(), [](int64_t size) { return size == 0; })) return;
  PlainScope plain;
  at::full({2}, argument(info, args, "value").toScalar(), at::dtype(self.scalar_type()));
}

// The CPU has no kernel for integers, GPUs do: it is asked about the numbers with floats then.
void check_histogram(const OpInfo& info, Args args) {
  const at::Tensor& x = args[0].toTensor();
  const bool integral = c10::isIntegralType(x.scalar_type(), /*includeBool=*/false);
  PlainScope plain;
  at::histc(at::ones({std::min<int64_t>(x.numel(), 1)}, integral ? at::kFloat : x.scalar_type()),
            argument(info, args, "bins").toInt(), argument(info, args, "min").toScalar(),
            argument(info, args, "max").toScalar());
}

}  // namespace

OwnChecks own_checks(const std::string& functional_name) {
  static const auto& checks = *new const std::unordered_map<std::string, OwnChecks>{
      {"aten::convolution", {.of_static = check_convolution}},
      {"aten::full", {.of_numbers = check_full}},
      {"aten::scalar_tensor", {.of_numbers = check_full}},
      {"aten::linspace", {.of_numbers = check_linspace}},
      {"aten::logspace", {.of_numbers = check_linspace}},
      {"aten::new_full", {.of_numbers = check_new_full}},
      {"aten::index_put", {.of_static = check_index_put}},
      {"aten::_index_put_impl", {.of_static = check_index_put}},
      {"aten::_unsafe_index_put", {.of_static = check_index_put}},
      {"aten::_unsafe_masked_index_put_accumulate", {.of_static = check_masked_index_put}},
      {"aten::put", {.of_static = check_put}},
      {"aten::multinomial", {.of_static = check_multinomial}},
      {"aten::randperm", {.of_static = check_randperm}},
      {"aten::randperm.generator", {.of_static = check_randperm}},
      {"aten::histc", {.of_numbers = check_histogram}},
      {"aten::constant_pad_nd", {.of_numbers = check_pad}},
      {"aten::avg_pool2d", {.of_static = check_windows}},
      {"aten::avg_pool3d", {.of_static = check_windows}},
      {"aten::max_pool2d_with_indices", {.of_static = check_windows}},
      {"aten::max_pool3d_with_indices", {.of_static = check_windows}},
      {"aten::fractional_max_pool2d", {.of_static = check_fractional_windows}},
      {"aten::fractional_max_pool3d", {.of_static = check_fractional_windows}},
  };
  if (functional_name.find("upsample_") != functional_name.npos &&
      functional_name.find("backward") == functional_name.npos) {
    return {.of_static = check_upsampling};
  }
  auto found = checks.find(functional_name);
  return found == checks.end() ? OwnChecks() : found->second;
}

void check_lists(const OpInfo& info, Args args) {
  for (size_t i = 0; i < args.size(); ++i) {
    TORCH_CHECK(!args[i].isSymIntList(), info.handle.schema().arguments()[i].name(), " of ",
                info.name, ": expected to contain only concrete integers, none below -2**62");
  }
}

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

}  // namespace lazyxla::dispatch
