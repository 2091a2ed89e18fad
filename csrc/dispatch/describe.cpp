// Describing calls: turns the meta functions' answer into the call's recipe (shape_memo.h).
#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "dispatch/device_state.h"
#include "dispatch/inference_store.h"
#include "dispatch/plain_call.h"
#include "dispatch/recorder.h"
#include "dispatch/tensor.h"
#include "program/buffer.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using ir::Arg;

Arg fixed_scalar(const IValue& value) {
  return {.kind = Arg::Kind::kFixedScalar, .constant = value, .dtype = value.toScalar().type()};
}

// Arguments as the lowering sees them. Numbers must be described as Scan read them.
Arg describe_scalar(const OpInfo& info, const IValue& value) {
  if (value.isNone()) return {};
  if ((value.isDouble() || value.isInt() || value.isBool()) && !info.numbers_are_static) {
    return {.kind = Arg::Kind::kSlot};
  }
  if (value.isComplexDouble() && !info.numbers_are_static) return {.kind = Arg::Kind::kComplex};
  return fixed_scalar(value);
}

Arg describe_tensor(const IValue& value) {
  if (!is_tensor(value)) return {};
  const at::Tensor& tensor = value.toTensor();
  if (tensor.device().type() == kDeviceType) return {.kind = Arg::Kind::kOperand};
  c10::Scalar number = number_of(*tensor.unsafeGetTensorImpl());
  if (number.isComplex()) return {.kind = Arg::Kind::kComplex};
  if (number.type() != c10::ScalarType::UInt64) return {.kind = Arg::Kind::kSlot};
  return {.kind = Arg::Kind::kFixedScalar,
          .constant = number,
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
      for (const IValue& element : value.toListRef()) {
        list.list.push_back(describe_scalar(info, element));
      }
      return list;
    case ArgKind::kIndex:
      if (value.isNone()) return {};
      return {.kind = Arg::Kind::kSlot};
    case ArgKind::kIndexList:
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

// PyTorch's own strides for a fresh tensor; a result whose strides overlap is made contiguous, as
// fresh memory cannot overlap.
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
  spec.settings = record::record_settings();
  spec.numbers_vary = scan.numbers_vary;
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgSource& source = info.functional_args[i];
    const ArgKind kind = info.kind_of(source);
    const bool unread = source.kind == ArgSource::kArgument && kind == ArgKind::kTensor &&
                        !info.args[source.position].operand;
    if (unread) {
      spec.args.emplace_back();
    } else if (source.kind == ArgSource::kDefault && args[i].isDouble()) {
      spec.args.push_back(fixed_scalar(args[i]));
    } else {
      spec.args.push_back(describe(info, args[i], kind, source.is_dtype));
    }
  }
  spec.slots.assign(scan.slot_specs.begin(), scan.slot_specs.end());
  spec.random = info.random;
  spec.collective = info.collective;
  spec.spreads = info.spreads;
  if (info.random) {
    for (int i = 0; i < 2; ++i) {
      spec.slots.push_back({c10::ScalarType::Long, true, ir::SlotKind::kRandom});
    }
  }
}

// Operators that fill a tensor of the right number of elements in its order, independent of its
// shape.
bool keeps_shape_of_out(const std::string& functional_name) {
  return is_among(std::string_view(functional_name).substr(0, functional_name.find('.')),
                  {"aten::arange", "aten::range", "aten::linspace", "aten::logspace"});
}

// Operators of which an out= tensor of another shape becomes contiguous, also where the result of
// the functional form is not. PyTorch's other CPU kernels give it the strides of that result.
bool makes_out_contiguous(const std::string& functional_name) {
  return is_among(functional_name,
                  {"aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c", "aten::cholesky",
                   "aten::cholesky_solve", "aten::geqrf", "aten::native_batch_norm",
                   "aten::slice_scatter", "aten::stack"});
}

// Operators whose kernel says nothing when it resizes an out= tensor that has elements: factories,
// and a few others. (arange has words of its own: lazyxla/argument_checks/kernel_warnings.py.)
bool resizes_silently(const OpInfo& info) {
  return info.factory ||
         is_among(std::string_view(info.functional_name).substr(0, info.functional_name.find('.')),
                  {"aten::addbmm", "aten::bernoulli", "aten::linspace", "aten::log_sigmoid_forward",
                   "aten::logspace", "aten::multinomial", "aten::narrow_copy"});
}

// Whether the tensor is written in place: PyTorch calls some in-place functions by their out=
// forms, with the same tensor.
bool is_changed_in_place(const OpInfo& info, const Scan& scan, const c10::TensorImpl& tensor) {
  return (info.reads_written || info.functional.hasTag(at::Tag::pointwise)) &&
         std::find(scan.operands.begin(), scan.operands.end(), &tensor) != scan.operands.end();
}

// The new content of each written tensor: the results from `first_result` on.
void describe_writes(const OpInfo& info, const Scan& scan, const Inference& inference,
                     size_t first_result, Recipe& recipe) {
  TORCH_CHECK(first_result + scan.written.size() <= inference.results.size(),
              "lazyxla: ", info.name, " writes ", scan.written.size(), " tensors, but ",
              info.functional_name, " yields ", inference.results.size() - first_result);
  for (size_t i = 0; i < scan.written.size(); ++i) {
    const c10::TensorImpl& target = *scan.written[i];
    // Such as a gradient that was not asked for. PyTorch's kernels refuse that, too.
    TORCH_CHECK(inference.results[first_result + i].defined, "lazyxla: ", info.name,
                " computes no result for one of its out= tensors with these arguments");
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
      TORCH_CHECK(!is_changed_in_place(info, scan, target), "output with shape ", target.sizes(),
                  " doesn't match the broadcast shape ", sizes);
      write.resized = true;
      write.silent = resizes_silently(info);
      c10::ScalarType dtype = write.geometry.dtype;
      write.geometry = asked && makes_out_contiguous(info.functional_name) ? inference.written[i]
                                                                           : fresh_geometry(result);
      write.geometry.dtype = dtype;
    }
    TORCH_CHECK(result.sizes == write.geometry.sizes, "lazyxla: ", info.name,
                " writes a tensor of shape ", write.geometry.sizes, ", but ", info.functional_name,
                " yields ", result.sizes);
    recipe.writes.push_back(std::move(write));
  }
}

}  // namespace

std::unique_ptr<Recipe> make_recipe(const OpInfo& info, c10::ArrayRef<IValue> functional,
                                    const Scan& scan, const Inference& inference) {
  auto recipe = std::make_unique<Recipe>();
  describe_spec(info, functional, scan, recipe->spec);
  for (const auto& result : inference.results) {
    if (!result.defined) continue;
    program::pjrt_type(result.geometry.dtype);  // throws if XLA has no such type
    recipe->spec.outputs.push_back({result.geometry.dtype, result.geometry.sizes});
  }
  // The counterpart's results are first the fresh ones, then those that are written.
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

}  // namespace lazyxla::dispatch
