// Shape inference: running an operator on meta tensors to learn what it yields.
#include <ATen/EmptyTensor.h>
#include <c10/core/DefaultDtype.h>

#include <unordered_set>

#include "common/counters.h"
#include "dispatch/checks.h"
#include "dispatch/device_state.h"
#include "dispatch/inference_store.h"
#include "dispatch/plain_call.h"
#include "dispatch/python_error.h"
#include "dispatch/recorder.h"
#include "dispatch/size_checks.h"
#include "dispatch/tensor.h"
#include "program/buffer.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using ir::Arg;
using ir::Recipe;
using Args = std::vector<IValue>;

bool is_tensor(const IValue& value) { return value.isTensor() && value.toTensor().defined(); }

at::Tensor meta_tensor(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;  // a number: PyTorch mixes it with any device
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// The argument with meta tensors for tensors and no generator or device of ours.
IValue to_meta(const IValue& value, ArgKind kind) {
  switch (kind) {
    case ArgKind::kTensor:
      return is_tensor(value) ? IValue(meta_tensor(value.toTensor())) : value;
    case ArgKind::kTensorList: {
      if (value.isNone()) return value;
      if (value.isTensorList()) {
        c10::List<at::Tensor> metas;
        for (const IValue& element : value.toListRef()) {
          metas.push_back(is_tensor(element) ? meta_tensor(element.toTensor()) : at::Tensor());
        }
        return metas;
      }
      c10::List<std::optional<at::Tensor>> metas;
      for (const IValue& element : value.toListRef()) {
        metas.push_back(is_tensor(element) ? std::optional(meta_tensor(element.toTensor()))
                                           : std::nullopt);
      }
      return metas;
    }
    case ArgKind::kGenerator:
      return IValue();
    case ArgKind::kDevice:
      return IValue(c10::Device(c10::DeviceType::Meta));
    default:
      return value;
  }
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  return op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
}

// Calls `op` on what `stack` holds; false if some operator within it has no meta kernel.
bool call_on_meta(const c10::OperatorHandle& op, Args& stack) {
  if (!has_meta_kernel(op)) return false;
  PlainScope plain;
  try {
    op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

// What the functional counterpart is called with, in its own order.
Args functional_args(const OpInfo& info, c10::ArrayRef<IValue> args) {
  Args result;
  for (const ArgSource& source : info.functional_args) {
    switch (source.kind) {
      case ArgSource::kArgument:
        result.push_back(args[source.position]);
        break;
      case ArgSource::kDefault:
        result.push_back(source.value);
        break;
      case ArgSource::kDtypeOfOut:
        result.emplace_back(static_cast<int64_t>(args[source.position].toTensor().scalar_type()));
        break;
      case ArgSource::kDeviceOfOut:
        result.emplace_back(args[source.position].toTensor().device());
        break;
    }
  }
  return result;
}

// Arguments as the lowering sees them. Numbers must be described as Scan read them.
Arg describe_scalar(const OpInfo& info, const IValue& value) {
  if (value.isNone()) return {};
  if ((value.isDouble() || value.isInt() || value.isBool()) && !info.numbers_are_static) {
    return {.kind = Arg::Kind::kSlot};
  }
  c10::ScalarType dtype = value.isBool()            ? c10::ScalarType::Bool
                          : value.isComplexDouble() ? c10::ScalarType::ComplexDouble
                          : value.isDouble()        ? c10::ScalarType::Double
                                                    : c10::ScalarType::Long;
  return {.kind = Arg::Kind::kFixedScalar, .constant = value, .dtype = dtype};
}

Arg describe_tensor(const IValue& value) {
  if (!is_tensor(value)) return {};
  const at::Tensor& tensor = value.toTensor();
  if (tensor.device().type() == kDeviceType) return {.kind = Arg::Kind::kOperand};
  c10::Scalar number = number_of(*tensor.unsafeGetTensorImpl());
  if (!number.isComplex()) return {.kind = Arg::Kind::kSlot};
  return {.kind = Arg::Kind::kFixedScalar,
          .constant = number.toComplexDouble(),
          .dtype = tensor.scalar_type(),
          .wrapped = tensor.unsafeGetTensorImpl()->is_wrapped_number()};
}

Arg describe(const OpInfo& info, const IValue& value, ArgKind kind, bool is_dtype) {
  Arg list{.kind = Arg::Kind::kList};
  switch (kind) {
    case ArgKind::kTensor:
      return describe_tensor(value);
    case ArgKind::kTensorList:
      if (value.isNone()) return {};
      for (const IValue& element : value.toListRef()) list.list.push_back(describe_tensor(element));
      return list;
    case ArgKind::kScalar:
      return describe_scalar(info, value);
    case ArgKind::kScalarList:
      if (value.isNone()) return {};
      if (value.isDoubleList()) {
        for (double element : value.toDoubleVector()) {
          list.list.push_back(describe_scalar(info, element));
        }
      } else {
        for (const IValue& element : value.toListRef()) {
          list.list.push_back(describe_scalar(info, element));
        }
      }
      return list;
    case ArgKind::kPlace:
      if (value.isNone()) return {};
      return {.kind = Arg::Kind::kSlot};
    case ArgKind::kPlaceList:
      list.list.assign(value.toIntList().size(), {.kind = Arg::Kind::kSlot});
      return list;
    case ArgKind::kGenerator:
    case ArgKind::kDevice:
      return {};
    case ArgKind::kStatic:
      return {.kind = is_dtype && value.isInt() ? Arg::Kind::kDtype : Arg::Kind::kConstant,
              .constant = value};
  }
  return {};
}

// PyTorch's own strides for a fresh tensor; a result that overlaps itself is made contiguous, as
// memory of its own cannot.
ir::Geometry fresh_geometry(ir::Geometry geometry) {
  if (ir::is_dense(geometry.sizes, geometry.strides)) return geometry;
  return ir::Geometry::contiguous(geometry.dtype, geometry.sizes);
}

const ir::Sharding* sharding_of(const std::string& text) {
  const ir::Sharding* sharding = ir::Sharding::find(text);
  TORCH_CHECK_VALUE(sharding, "lazyxla::constrain: there is no sharding \"", text,
                    "\" in this process; lazyxla.constrain makes them");
  return sharding;
}

void describe_spec(const OpInfo& info, c10::ArrayRef<IValue> args, const Scan& scan,
                   ir::OpSpec& spec) {
  spec.name = info.functional_name;
  if (spec.name == "lazyxla::constrain") spec.sharding = sharding_of(args[1].toStringRef());
  spec.settings = graph::record_settings();
  spec.numbers_vary = scan.numbers_vary;
  const auto& schema_args = info.functional.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgSource& source = info.functional_args[i];
    ArgKind kind = source.kind == ArgSource::kArgument ? info.args[source.position].kind
                   : schema_args[i].name() == "device" ? ArgKind::kDevice
                                                       : ArgKind::kStatic;
    if (source.kind == ArgSource::kDefault && args[i].isDouble()) kind = ArgKind::kScalar;
    bool unread = source.kind == ArgSource::kArgument && kind == ArgKind::kTensor &&
                  !info.args[source.position].operand;
    Arg arg = unread ? Arg{} : describe(info, args[i], kind, source.is_dtype);
    if (source.kind == ArgSource::kDefault && arg.kind == Arg::Kind::kSlot) {
      arg = {
          .kind = Arg::Kind::kFixedScalar, .constant = args[i], .dtype = c10::ScalarType::Double};
    }
    spec.args.push_back(std::move(arg));
  }
  spec.slots.assign(scan.slot_specs.begin(), scan.slot_specs.end());
  spec.random = info.random;
  spec.collective = info.collective;
  if (info.random) {
    for (int i = 0; i < 2; ++i) {
      spec.slots.push_back({c10::ScalarType::Long, true, ir::SlotKind::kRandom});
    }
  }
}

// Operators that fill a tensor of the right number of elements in its order, whatever its shape.
bool keeps_shape_of_out(const std::string& functional_name) {
  static const auto& names = *new const std::unordered_set<std::string>{
      "aten::arange",
      "aten::arange.start",
      "aten::arange.start_step",
      "aten::range",
      "aten::range.step",
      "aten::linspace",
      "aten::linspace.Tensor_Tensor",
      "aten::linspace.Tensor_Scalar",
      "aten::linspace.Scalar_Tensor",
      "aten::logspace",
      "aten::logspace.Tensor_Tensor",
      "aten::logspace.Tensor_Scalar",
      "aten::logspace.Scalar_Tensor",
  };
  return names.count(functional_name) > 0;
}

// What becomes of each written tensor; its new content is the result `first_result` and following.
void describe_writes(const OpInfo& info, const Scan& scan, const ir::Inference& inference,
                     size_t first_result, Recipe& recipe) {
  for (size_t i = 0; i < scan.written.size(); ++i) {
    const c10::TensorImpl& target = *scan.written[i];
    const ir::Geometry& result = inference.results[first_result + i].geometry;
    Recipe::Write write{.output = static_cast<uint32_t>(first_result + i),
                        .in_list = info.writes_list,
                        .geometry = geometry_of(target)};
    write.cast = result.dtype != write.geometry.dtype;
    write.reshaped = target.numel() == result.numel() && target.sizes() != result.sizes &&
                     keeps_shape_of_out(info.functional_name);
    if (write.reshaped) {
      recipe.writes.push_back(std::move(write));
      continue;
    }
    bool asked = i < inference.written.size();
    c10::IntArrayRef sizes = asked ? inference.written[i].sizes : result.sizes;
    if (sizes != target.sizes()) {
      write.resized = true;
      c10::ScalarType dtype = write.geometry.dtype;
      write.geometry = asked ? inference.written[i] : fresh_geometry(result);
      write.geometry.dtype = dtype;
    }
    TORCH_CHECK(result.sizes == write.geometry.sizes, "lazyxla: ", info.name,
                " writes a tensor of shape ", write.geometry.sizes, ", but ", info.functional_name,
                " yields ", result.sizes);
    recipe.writes.push_back(std::move(write));
  }
}

ir::Geometry geometry_or_none(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  ir::Geometry geometry = geometry_of(*tensor.unsafeGetTensorImpl());
  geometry.offset = 0;
  return geometry;
}

// Asks the meta functions. Empty if some operator on the way has none, or if it yields sparse
// tensors.
std::optional<ir::Inference> ask(const OpInfo& info, c10::ArrayRef<IValue> args,
                                 c10::ArrayRef<IValue> functional) {
  ir::Inference inference;
  // The writing form first: it checks what only it knows (a result that cannot be cast to the
  // tensor, a shape that cannot be broadcast into it) and resizes out= tensors.
  if (info.writes && has_meta_kernel(info.handle)) {
    Args stack;
    std::vector<at::Tensor> written;
    for (size_t i = 0; i < args.size(); ++i) stack.push_back(to_meta(args[i], info.args[i].kind));
    for (size_t i = 0; i < args.size(); ++i) {
      if (info.args[i].written) flatten(stack[i], written);
    }
    if (call_on_meta(info.handle, stack)) {
      for (const at::Tensor& tensor : written) {
        if (tensor.defined()) inference.written.push_back(geometry_or_none(tensor));
      }
    }
  }
  Args stack;
  for (size_t i = 0; i < functional.size(); ++i) {
    const ArgSource& source = info.functional_args[i];
    ArgKind kind = source.kind == ArgSource::kArgument      ? info.args[source.position].kind
                   : source.kind == ArgSource::kDeviceOfOut ? ArgKind::kDevice
                                                            : ArgKind::kStatic;
    stack.push_back(to_meta(functional[i], kind));
  }
  if (!call_on_meta(info.functional, stack)) return std::nullopt;
  for (const IValue& value : stack) {
    std::vector<at::Tensor> results;
    flatten(value, results);
    inference.counts.push_back(results.size());
    for (const at::Tensor& result : results) {
      if (result.defined() && result.layout() != c10::kStrided) return std::nullopt;
      inference.results.push_back({result.defined(), geometry_or_none(result)});
    }
  }
  return inference;
}

// The key of the inference on disk: the operator by its name, then the scan's key without the first
// word, which is an address.
std::string store_key(const OpInfo& info, const Scan& scan) {
  std::string key = info.name + "\n";
  key += static_cast<char>(c10::get_default_dtype_as_scalartype());
  key.append(reinterpret_cast<const char*>(scan.key.data() + 1),
             (scan.key.size() - 1) * sizeof(uint64_t));
  return key;
}

// PyTorch leaves a convolution's memory format to the backend. Ours does what the CPU does:
// channels-last if the input or the weight is.
void choose_memory_format(c10::ArrayRef<IValue> args, ir::Inference& inference) {
  ir::Geometry& result = inference.results[0].geometry;
  for (int i = 0; i < 2; ++i) {
    auto format = args[i].toTensor().suggest_memory_format();
    if (format == c10::MemoryFormat::Contiguous) continue;
    auto strides = format == c10::MemoryFormat::ChannelsLast
                       ? c10::get_channels_last_strides_2d(result.sizes)
                       : c10::get_channels_last_strides_3d(result.sizes);
    result.strides.assign(strides.begin(), strides.end());
  }
}

std::unique_ptr<Recipe> make_recipe(const OpInfo& info, c10::ArrayRef<IValue> functional,
                                    const Scan& scan, const ir::Inference& inference) {
  auto recipe = std::make_unique<Recipe>();
  describe_spec(info, functional, scan, recipe->spec);
  for (const auto& result : inference.results) {
    if (result.defined) graph::pjrt_type(result.geometry.dtype);  // throws if XLA has no such type
    if (result.defined)
      recipe->spec.outputs.push_back({result.geometry.dtype, result.geometry.sizes});
  }
  // Fresh results come first among the counterpart's results, then what it writes.
  int next_output = 0;
  size_t position = 0;
  const auto& returns = info.handle.schema().returns();
  for (size_t r = 0; r < info.returns.size(); ++r) {
    if (info.returns[r] >= 0) {
      recipe->returns.push_back({info.returns[r], false, 0, 0});
      continue;
    }
    bool is_list = returns[r].type()->kind() == c10::TypeKind::ListType;
    uint32_t count = inference.counts[r];
    recipe->returns.push_back({-1, is_list, static_cast<uint32_t>(recipe->fresh.size()), count});
    for (uint32_t i = 0; i < count; ++i, ++position) {
      const auto& result = inference.results[position];
      ir::Geometry geometry = fresh_geometry(result.geometry);
      size_t nbytes = at::detail::computeStorageNbytes(geometry.sizes, geometry.strides,
                                                       c10::elementSize(geometry.dtype));
      recipe->fresh.push_back({result.defined ? next_output++ : -1, std::move(geometry), nbytes});
    }
  }
  describe_writes(info, scan, inference, position, *recipe);
  return recipe;
}

// Whether torch.library says that an operator has no fake implementation, or one that works on fake
// tensors only since the shape of its result depends on data.
bool has_no_fake(const std::exception& error) {
  std::string_view text = error.what();
  return text.find("no fake impl registered") != text.npos ||
         text.find("outputs that have data-dependent shapes") != text.npos;
}

}  // namespace

std::unique_ptr<Recipe> infer(const OpInfo& info, c10::ArrayRef<IValue> args, const Scan& scan) {
  check_static(info, args);
  Args functional = functional_args(info, args);
  std::string key = store_key(info, scan);
  // What a user's own operator yields may be another thing in the next process.
  bool lasting = info.name.starts_with("aten::");
  auto inference = lasting ? ir::InferenceStore::get().find(key) : std::nullopt;
  if (!inference) {
    ++graph::Counters::get().shape_inferences;
    if (lasting) check_for_kernel(info, args);
    try {
      inference = ask(info, args, functional);
    } catch (const std::exception& error) {
      if (is_interruption(error)) throw;
      if (!lasting && has_no_fake(error)) return nullptr;
      // A user's kernel is not called with made-up data: nobody knows what it does.
      if (!lasting || !affordable_on_cpu(scan)) throw;
      check_as_cpu(info, args, {.fill = 1});
    }
    if (inference && info.checks.on_cpu_with) {
      check_as_cpu(info, args, {.fill = *info.checks.on_cpu_with, .shrink = true});
    }
    if (!inference) return nullptr;
    if (lasting) check_sizes(info, args, *inference);
    if (lasting) check_small(info, args, scan, *inference);
    if (info.functional_name == "aten::convolution") choose_memory_format(args, *inference);
    if (lasting) ir::InferenceStore::get().add(key, *inference);
  }
  return make_recipe(info, functional, scan, *inference);
}

}  // namespace lazyxla::dispatch
