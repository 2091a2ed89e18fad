// The arguments of a node's call, for the host's kernels (host_program.h).
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <vector>

#include "ir/geometry.h"
#include "ir/node.h"

namespace lazyxla::dispatch {

// Returns a node's arguments one by one, in order.
class Arguments {
 public:
  Arguments(const ir::OpSpec& spec, c10::ArrayRef<at::Tensor> operands,
            c10::ArrayRef<ir::ScalarValue> slots)
      : spec_(spec), operands_(operands), slots_(slots) {}

  const at::Tensor& operand() { return operands_[next_operand_++]; }

  // As a value of the schema's type.
  c10::IValue read(const ir::Arg& arg, c10::TypePtr type) {
    bool is_optional = false;
    while (type->kind() == c10::TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
      is_optional = true;
    }
    switch (arg.kind) {
      case ir::Arg::Kind::kOperand:
        return operand();
      case ir::Arg::Kind::kSlot:
        return slot(type->kind());
      case ir::Arg::Kind::kComplex:
        return complex(type->kind());
      case ir::Arg::Kind::kFixedScalar:
        return number(arg.constant.toScalar(), arg.dtype, arg.wrapped, type->kind());
      case ir::Arg::Kind::kConstant:
        if (arg.constant.isNone() && type->kind() == c10::TypeKind::TensorType && !is_optional) {
          return at::zeros(spec_.outputs[0].dims, spec_.outputs[0].dtype);  // only its type matters
        }
        return arg.constant;
      case ir::Arg::Kind::kDtype:
        return arg.constant;
      case ir::Arg::Kind::kList:
        return list(arg.list, type->castRaw<c10::ListType>()->getElementType());
      default:
        TORCH_CHECK(false, "no argument of a CPU kernel");
    }
  }

  // The tensor that a view shows, after the operands.
  at::Tensor through(const at::Tensor& memory) const {
    const ir::Geometry& base = spec_.args[next_operand_].geometry;
    const ir::Geometry& view = spec_.args[next_operand_ + 1].geometry;
    int64_t offset = view.offset;
    if (spec_.args.size() > next_operand_ + 2) {
      ir::Begin begin;
      const auto weights = spec_.args[next_operand_ + 2].constant.toIntVector();
      begin.weights.assign(weights.begin(), weights.end());
      for (const ir::ScalarValue& start : slots_) begin.starts.push_back(start.i);
      offset = ir::offset_of(base, view, begin);
    }
    // The memory may be a part of a storage, where it is a view itself.
    const at::Tensor elements = memory.view(view.dtype);
    return elements.as_strided(view.sizes, view.strides, elements.storage_offset() + offset);
  }

  c10::IValue slot(c10::TypeKind kind) {
    const ir::SlotSpec& spec = spec_.slots[next_slot_];
    const ir::ScalarValue& value = slots_[next_slot_++];
    const at::Scalar scalar = spec.kind == ir::SlotKind::kFloat     ? at::Scalar(value.f)
                              : spec.dtype == c10::ScalarType::Bool ? at::Scalar(value.i != 0)
                                                                    : at::Scalar(value.i);
    return number(scalar, spec.dtype, spec.wrapped, kind);
  }

 private:
  c10::IValue complex(c10::TypeKind kind) {
    const ir::SlotSpec& spec = spec_.slots[next_slot_];
    const c10::complex<double> value(slots_[next_slot_].f, slots_[next_slot_ + 1].f);
    next_slot_ += 2;
    return number(value, spec.dtype, spec.wrapped, kind);
  }

  static c10::IValue number(const at::Scalar& value, c10::ScalarType dtype, bool wrapped,
                            c10::TypeKind kind) {
    if (kind != c10::TypeKind::TensorType) return value;
    at::Tensor tensor = at::scalar_tensor(value, dtype);
    tensor.unsafeGetTensorImpl()->set_wrapped_number(wrapped);
    return tensor;
  }

  c10::IValue list(const std::vector<ir::Arg>& elements, const c10::TypePtr& type) {
    if (type->kind() == c10::TypeKind::TensorType) {
      c10::List<at::Tensor> tensors;
      for (const ir::Arg& element : elements) tensors.push_back(read(element, type).toTensor());
      return tensors;
    }
    c10::impl::GenericList values(type);
    for (const ir::Arg& element : elements) values.push_back(read(element, type));
    return values;
  }

  const ir::OpSpec& spec_;
  c10::ArrayRef<at::Tensor> operands_;
  c10::ArrayRef<ir::ScalarValue> slots_;
  size_t next_operand_ = 0, next_slot_ = 0;
};

}  // namespace lazyxla::dispatch
