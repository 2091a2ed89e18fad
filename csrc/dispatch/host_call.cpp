#include "dispatch/host_call.h"

#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <xla/ffi/api/c_api.h>

#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/counters.h"
#include "common/element_types.h"
#include "common/kernel_thread.h"
#include "dispatch/plain_call.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using c10::TypeKind;

c10::ScalarType torch_dtype(XLA_FFI_DataType dtype) {
  switch (dtype) {
#define LAZYXLA_CASE(xla, torch) \
  case XLA_FFI_DataType_##xla:   \
    return c10::ScalarType::torch;
    LAZYXLA_ELEMENT_TYPES(LAZYXLA_CASE)
#undef LAZYXLA_CASE
    case XLA_FFI_DataType_F8E8M0FNU:
      return c10::ScalarType::Float8_e8m0fnu;
    default:
      TORCH_CHECK(false, "XLA's element type ", static_cast<int>(dtype), " is not one of torch's");
  }
}

// A buffer of the plugin as a tensor on the same memory.
at::Tensor wrap(const void* raw) {
  const auto& buffer = *static_cast<const XLA_FFI_Buffer*>(raw);
  return at::from_blob(buffer.data, {buffer.dims, static_cast<size_t>(buffer.rank)},
                       c10::TensorOptions().dtype(torch_dtype(buffer.dtype)));
}

// An attribute of the call, by one of three types; reading it as another is an error.
struct Attribute {
  XLA_FFI_AttrType type;
  const void* raw;

  int64_t number() const {
    TORCH_CHECK(type == XLA_FFI_AttrType_SCALAR, "expected a number");
    const auto& scalar = *static_cast<const XLA_FFI_Scalar*>(raw);
    if (scalar.dtype == XLA_FFI_DataType_PRED) return *static_cast<const bool*>(scalar.value);
    TORCH_CHECK(scalar.dtype == XLA_FFI_DataType_S64, "expected an integer");
    return *static_cast<const int64_t*>(scalar.value);
  }

  c10::IntArrayRef numbers() const {
    TORCH_CHECK(type == XLA_FFI_AttrType_ARRAY, "expected an array");
    const auto& array = *static_cast<const XLA_FFI_Array*>(raw);
    TORCH_CHECK(array.dtype == XLA_FFI_DataType_S64, "expected integers");
    return {static_cast<const int64_t*>(array.data), array.size};
  }

  std::string text() const {
    TORCH_CHECK(type == XLA_FFI_AttrType_STRING, "expected a string");
    const auto& span = *static_cast<const XLA_FFI_ByteSpan*>(raw);
    return {span.ptr, span.len};
  }

  const XLA_FFI_Attrs& dictionary() const {
    TORCH_CHECK(type == XLA_FFI_AttrType_DICTIONARY, "expected a dictionary");
    return *static_cast<const XLA_FFI_Attrs*>(raw);
  }
};

std::optional<Attribute> find(const XLA_FFI_Attrs& attributes, std::string_view name) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const XLA_FFI_ByteSpan& found = *attributes.names[i];
    if (std::string_view(found.ptr, found.len) == name) {
      return Attribute{attributes.types[i], attributes.attrs[i]};
    }
  }
  return std::nullopt;
}

// Turns the attributes of one call into the operator's arguments.
class Arguments {
 public:
  explicit Arguments(const XLA_FFI_Args& operands) : operands_(operands) {}

  IValue read(const c10::Argument& argument, const std::optional<Attribute>& given) const {
    if (!given) return IValue();
    const c10::TypePtr type = without_optional(argument.real_type());
    switch (type->kind()) {
      case TypeKind::StringType:
        return given->text();
      case TypeKind::ScalarTypeType:
        return static_cast<int64_t>(c10::getStringToDtypeMap().at(given->text()));
      case TypeKind::ListType: {
        c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
        if (element->kind() == TypeKind::SymIntType) element = c10::IntType::get();
        c10::impl::GenericList list(element);
        for (int64_t number : given->numbers()) list.push_back(one(*element, number));
        return list;
      }
      default:
        return one(*type, given->number());
    }
  }

 private:
  static c10::TypePtr without_optional(c10::TypePtr type) {
    while (type->kind() == TypeKind::OptionalType) {
      type = type->castRaw<c10::OptionalType>()->getElementType();
    }
    return type;
  }

  // An argument, or an element of one.
  IValue one(const c10::Type& type, int64_t given) const {
    switch (type.kind()) {
      case TypeKind::OptionalType:
        return given < 0 ? IValue() : IValue(operand(given));
      case TypeKind::TensorType:
        return operand(given);
      case TypeKind::NumberType:
        return operand(given).item();
      case TypeKind::FloatType:
        return operand(given).item().toDouble();
      case TypeKind::BoolType:
        return given != 0;
      default:  // int and SymInt
        return given;
    }
  }

  at::Tensor operand(int64_t number) const {
    TORCH_CHECK(number >= 0 && number < operands_.size, "there is no operand ", number);
    return wrap(operands_.args[number]);
  }

  const XLA_FFI_Args& operands_;
};

void call(const c10::OperatorHandle& op, const XLA_FFI_CallFrame& frame) {
  PlainScope plain;
  auto given = find(frame.attrs, "arguments");
  Arguments arguments(frame.args);
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    stack.push_back(arguments.read(
        argument, given ? find(given->dictionary(), argument.name()) : std::nullopt));
  }
  op.callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const IValue& value : stack) flatten(value, results);
  int64_t next = 0;
  for (const at::Tensor& result : results) {
    if (!result.defined()) continue;
    TORCH_CHECK(next < frame.rets.size, "it returned more than ", next, " tensors");
    at::Tensor target = wrap(frame.rets.rets[next++]);
    TORCH_CHECK(result.sizes() == target.sizes(), "result ", next - 1, " has the shape ",
                result.sizes(), ", its meta function says ", target.sizes());
    target.copy_(result);
  }
  TORCH_CHECK(next == frame.rets.size, "it returned ", next, " tensors, its meta function says ",
              frame.rets.size);
}

}  // namespace

void host_call(const XLA_FFI_CallFrame& frame) {
  std::string name;
  try {
    auto op = find(frame.attrs, "operator");
    TORCH_CHECK(op, "lazyxla.host_call names no operator");
    name = op->text();
    const bool by_choice = find(frame.attrs, "by_choice").has_value();
    ++(by_choice ? Counters::get().kernel_calls : Counters::get().host_calls);
    const auto handle = find_operator(name);
    TORCH_CHECK(handle, "there is no operator ", name);
    if (by_choice) {
      run_on_kernel_thread([&] {
        at::init_num_threads();  // the user's number, which the thread has to be told
        call(*handle, frame);
      });
    } else {
      call(*handle, frame);
    }
  } catch (const c10::Error& error) {
    throw std::runtime_error(name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(name + ": " + error.what());
  }
}

}  // namespace lazyxla::dispatch
