#include "dispatch/host_call.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <xla/ffi/api/c_api.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/counters.h"
#include "common/element_types.h"
#include "common/locks.h"
#include "dispatch/parts.h"
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

// A part of a call. The operands and results are cut along `dims`, the operands' and then the
// results', -1 for what each part has as a whole; the integer argument `divided` is of each part
// its share. The kernel takes the transposes of the operands that `transposed` numbers.
struct Part {
  c10::IntArrayRef dims;
  c10::IntArrayRef transposed;
  std::string divided;
  int64_t index = 0;
  int64_t count = 1;

  at::Tensor of(const at::Tensor& x, int64_t number) const {
    if (count == 1 || dims[number] < 0) return x;
    const int64_t size = x.size(dims[number]);
    const int64_t begin = size * index / count;
    return x.narrow(dims[number], begin, size * (index + 1) / count - begin);
  }
};

// Turns the attributes of one call into the operator's arguments.
class Arguments {
 public:
  Arguments(const XLA_FFI_Args& operands, const Part& part) : operands_(operands), part_(part) {}

  IValue read(const c10::Argument& argument, const std::optional<Attribute>& given) const {
    if (!given) return IValue();
    if (argument.name() == part_.divided) return given->number() / part_.count;
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
    const at::Tensor x = part_.of(wrap(operands_.args[number]), number);
    const auto& transposed = part_.transposed;
    return std::count(transposed.begin(), transposed.end(), number) > 0 ? x.t() : x;
  }

  const XLA_FFI_Args& operands_;
  const Part& part_;
};

// Whether `op`, another overload, takes the arguments of `functional` and then tensors for all of
// its results.
bool is_out_form(const c10::FunctionSchema& op, const c10::FunctionSchema& functional) {
  const auto& arguments = op.arguments();
  const auto& expected = functional.arguments();
  if (arguments.size() != expected.size() + functional.returns().size()) return false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_out = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (is_out != (i >= expected.size())) return false;
    if (!is_out && (arguments[i].name() != expected[i].name() ||
                    *arguments[i].type() != *expected[i].type())) {
      return false;
    }
  }
  return true;
}

// The out= overload of an operator, if it has one.
std::optional<c10::OperatorHandle> find_out_form(const c10::OperatorHandle& op) {
  using Forms = std::unordered_map<c10::OperatorName, std::optional<c10::OperatorHandle>>;
  static auto& known = *new Guarded<Forms>();
  const c10::OperatorName& name = op.operator_name();
  auto forms = known.hold();
  const auto found = forms->find(name);
  if (found != forms->end()) return found->second;
  std::optional<c10::OperatorHandle> form;
  for (const c10::OperatorName& other : c10::Dispatcher::singleton().getAllOpNames()) {
    if (other.name != name.name) continue;
    const auto handle = c10::Dispatcher::singleton().findSchema(other);
    if (handle && is_out_form(handle->schema(), op.schema())) form = handle;
  }
  return forms->emplace(name, form).first->second;
}

// Calls the operator. With `out`, its out= overload, the kernel writes to the plugin's memory.
void call(const c10::OperatorHandle& op, const std::optional<c10::OperatorHandle>& out,
          const XLA_FFI_CallFrame& frame, const Part& part) {
  PlainScope plain;
  auto given = find(frame.attrs, "arguments");
  Arguments arguments(frame.args, part);
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    stack.push_back(arguments.read(
        argument, given ? find(given->dictionary(), argument.name()) : std::nullopt));
  }
  const auto target = [&](int64_t i) {
    return part.of(wrap(frame.rets.rets[i]), frame.args.size + i);
  };
  if (out) {
    for (int64_t i = 0; i < frame.rets.size; ++i) stack.push_back(target(i));
  }
  (out ? *out : op).callBoxed(&stack);
  std::vector<at::Tensor> results;
  for (const IValue& value : stack) flatten(value, results);
  int64_t next = 0;
  for (const at::Tensor& result : results) {
    if (!result.defined()) continue;
    TORCH_CHECK(next < frame.rets.size, "it returned more than ", next, " tensors");
    const at::Tensor expected = target(next++);  // what was passed may have been resized
    TORCH_CHECK(result.sizes() == expected.sizes(), "result ", next - 1, " has the shape ",
                result.sizes(), ", its meta function says ", expected.sizes());
    if (result.data_ptr() != expected.data_ptr()) expected.copy_(result);
  }
  TORCH_CHECK(next == frame.rets.size, "it returned ", next, " tensors, its meta function says ",
              frame.rets.size);
}

// How many parts a call can have: no more than `most`, nor than there is to cut, and as many times
// in what is divided.
int64_t count_parts(const XLA_FFI_CallFrame& frame, const Part& part, int64_t most) {
  const auto is_cut = [](int64_t dim) { return dim >= 0; };
  if (std::none_of(part.dims.begin(), part.dims.end(), is_cut)) return 1;
  for (int64_t i = 0; i < frame.args.size; ++i) {
    if (part.dims[i] >= 0) most = std::min(most, wrap(frame.args.args[i]).size(part.dims[i]));
  }
  most = std::max<int64_t>(most, 1);
  if (!part.divided.empty()) {
    const auto given = find(frame.attrs, "arguments");
    const auto divided = given ? find(given->dictionary(), part.divided) : std::nullopt;
    TORCH_CHECK(divided, "there is no argument ", part.divided, " to divide");
    const int64_t number = divided->number();
    while (number % most != 0) --most;
  }
  return most;
}

void call_in_parts(const c10::OperatorHandle& op, const XLA_FFI_CallFrame& frame,
                   c10::IntArrayRef split) {
  TORCH_CHECK(static_cast<int64_t>(split.size()) == frame.args.size + frame.rets.size, "split has ",
              split.size(), " dimensions");
  Part whole{split, {}, {}};
  if (const auto divided = find(frame.attrs, "divided")) whole.divided = divided->text();
  if (const auto given = find(frame.attrs, "transposed")) whole.transposed = given->numbers();
  const int64_t count = count_parts(frame, whole, most_parts(frame));
  const bool all_taken = static_cast<int64_t>(op.schema().returns().size()) == frame.rets.size;
  const auto out = all_taken ? find_out_form(op) : std::nullopt;
  run_parts(frame, count, [&](int64_t i) {
    call(op, out, frame, {split, whole.transposed, whole.divided, i, count});
  });
}

}  // namespace

void host_call(const XLA_FFI_CallFrame& frame) {
  std::string name;
  try {
    auto op = find(frame.attrs, "operator");
    TORCH_CHECK(op, "lazyxla.host_call names no operator");
    name = op->text();
    const auto split = find(frame.attrs, "split");
    ++(split ? Counters::get().kernel_calls : Counters::get().host_calls);
    auto handle = split ? std::nullopt : find_own_kernel(name);
    if (!handle) handle = find_operator(name);
    TORCH_CHECK(handle, "there is no operator ", name);
    if (split) {
      call_in_parts(*handle, frame, split->numbers());
    } else {
      call(*handle, std::nullopt, frame, {});
    }
  } catch (const c10::LinAlgError& error) {
    throw std::domain_error(name + ": " + error.what_without_backtrace());
  } catch (const c10::Error& error) {
    throw std::runtime_error(name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(name + ": " + error.what());
  }
}

}  // namespace lazyxla::dispatch
