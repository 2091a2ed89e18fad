// Shape inference: running an operator on meta tensors to learn what it yields.
#include <ATen/EmptyTensor.h>
#include <c10/core/DefaultDtype.h>

#include "common/counters.h"
#include "dispatch/checks.h"
#include "dispatch/inference_store.h"
#include "dispatch/lowering_kind.h"
#include "dispatch/plain_call.h"
#include "dispatch/python_error.h"
#include "dispatch/recorder.h"
#include "dispatch/tensor.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using Args = std::vector<IValue>;

at::Tensor meta_tensor(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;  // a number: PyTorch mixes it with any device
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

IValue to_meta(const IValue& value, ArgKind kind) {
  return with_tensors(value, kind, c10::DeviceType::Meta, meta_tensor);
}

bool has_meta_kernel(const c10::OperatorHandle& op) {
  return op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
}

// The operator that shows on meta tensors what `op` yields: ours, of the same schema, where torch
// has no meta function or one that differs from its CPU kernel (lazyxla/meta_functions.py).
c10::OperatorHandle asked_for(const c10::OperatorHandle& op) {
  const c10::OperatorName& name = op.operator_name();
  constexpr std::string_view kAten = "aten::";
  if (!name.name.starts_with(kAten)) return op;
  const std::string own = "lazyxla_meta::" + name.name.substr(kAten.size());
  return c10::Dispatcher::singleton().findSchema({own, name.overload_name}).value_or(op);
}

// Calls `op`, or the operator that replaces it, on the arguments on `stack`; false if some operator
// within it has no meta kernel.
bool call_on_meta(const c10::OperatorHandle& op, Args& stack) {
  const c10::OperatorHandle asked = asked_for(op);
  if (!has_meta_kernel(asked)) return false;
  PlainScope plain;
  try {
    asked.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    return false;
  }
  return true;
}

// The arguments of the functional counterpart, in its own order.
Args functional_args(const OpInfo& info, c10::ArrayRef<IValue> args) {
  Args result;
  auto dtype_of = [&](int position) {
    return static_cast<int64_t>(args[position].toTensor().scalar_type());
  };
  for (const ArgSource& source : info.functional_args) {
    switch (source.kind) {
      case ArgSource::kArgument:
        result.push_back(args[source.position]);
        if (source.out >= 0 && result.back().isNone()) result.back() = dtype_of(source.out);
        break;
      case ArgSource::kDefault:
        result.push_back(source.value);
        break;
      case ArgSource::kDtypeOfOut:
        result.emplace_back(dtype_of(source.position));
        break;
      case ArgSource::kDeviceOfOut:
        result.emplace_back(args[source.position].toTensor().device());
        break;
    }
  }
  return result;
}

ir::Geometry geometry_or_none(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  ir::Geometry geometry = geometry_of(*tensor.unsafeGetTensorImpl());
  geometry.offset = 0;
  return geometry;
}

// Asks the functional form. Empty if some operator called within has no meta function, or if the
// result is a sparse tensor.
std::optional<Inference> ask(const OpInfo& info, c10::ArrayRef<IValue> functional) {
  Inference inference;
  Args stack;
  for (size_t i = 0; i < functional.size(); ++i) {
    stack.push_back(to_meta(functional[i], info.kind_of(info.functional_args[i])));
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

// Asks the writing form, which checks what only it knows (a result that cannot be cast to the
// tensor, a shape that cannot be broadcast into it) and resizes out= tensors. One of another size
// than the result is given to it without elements: PyTorch warns of those that have some, and the
// recorder does so in every call.
void ask_writing(const OpInfo& info, c10::ArrayRef<IValue> args, Inference& inference) {
  if (!info.writes || !has_meta_kernel(asked_for(info.handle))) return;
  size_t result = inference.first_written(info.returns);
  Args stack;
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgInfo& arg = info.args[i];
    auto target = [&](const at::Tensor& tensor) {
      const bool is_out = !arg.operand && result < inference.results.size();
      const bool fits = !is_out || tensor.sizes() == inference.results[result].geometry.sizes;
      ++result;
      return fits ? meta_tensor(tensor)
                  : at::detail::empty_strided_meta({0}, {1}, tensor.scalar_type());
    };
    stack.push_back(arg.written ? with_tensors(args[i], arg.kind, c10::DeviceType::Meta, target)
                                : to_meta(args[i], arg.kind));
    if (arg.written) flatten(stack.back(), written);
  }
  if (!call_on_meta(info.handle, stack)) return;
  for (const at::Tensor& tensor : written) {
    if (tensor.defined()) inference.written.push_back(geometry_or_none(tensor));
  }
}

// Whether a later function had no gradient to give to this one's backward operator. PyTorch's
// kernels give none then, either.
bool lacks_gradient(const OpInfo& info, c10::ArrayRef<IValue> args) {
  if (info.writes || !is_backward(info)) return false;
  const auto& arguments = info.handle.schema().arguments();
  for (size_t i = 0; i < args.size(); ++i) {
    const bool required = arguments[i].type()->kind() == c10::TypeKind::TensorType;
    if (required && arguments[i].name().starts_with("grad") && !is_tensor(args[i])) return true;
  }
  return false;
}

std::unique_ptr<Recipe> no_results(const OpInfo& info, c10::ArrayRef<IValue> functional,
                                   const Scan& scan) {
  Inference nothing;
  nothing.results.resize(info.returns.size(), {.defined = false, .geometry = {}});
  nothing.counts.resize(info.returns.size(), 1);
  auto recipe = make_recipe(info, functional, scan, nothing);
  recipe->runs = Recipe::Runs::kNowhere;
  return recipe;
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
  if (lacks_gradient(info, args)) return no_results(info, functional, scan);
  std::string key = store_key(info, scan);
  // The results of a user's own operator may differ in the next process.
  bool lasting = info.name.starts_with("aten::");
  auto inference = lasting ? find_inference(key) : std::nullopt;
  std::exception_ptr lack;  // the CPU has no kernel for the dtypes
  const bool is_new = !inference;
  if (is_new) {
    ++Counters::get().shape_inferences;
    if (info.checks.before) info.checks.before(info, args, {});
    try {
      auto found = ask(info, functional);
      if (found) ask_writing(info, args, *found);
      inference = std::move(found);  // of none that one of the two refuses
    } catch (const std::exception& error) {
      if (is_interruption(error)) throw;
      if (!lasting && has_no_fake(error)) return nullptr;
      // A user's kernel is not called with made-up data: its effects are unknown.
      if (!lasting || !can_ask_cpu(info, scan)) throw;
      check_as_cpu(info, args, {.fill = 1});
    }
    if (inference && info.checks.on_cpu_with) {
      check_as_cpu(info, args, {.fill = *info.checks.on_cpu_with, .shrink = true});
    }
    if (inference && lasting) lack = check_dtypes(info, args, *inference);
    if (!inference) return nullptr;
    if (info.checks.after) info.checks.after(info, args, inference->results[0].geometry.sizes);
    if (lasting) check_small(info, args, scan, *inference);
  }
  auto recipe = make_recipe(info, functional, scan, *inference);
  if (lack && recipe->runs != Recipe::Runs::kNowhere &&
      check_lowering(recipe->spec, scan) == Recipe::Runs::kHost) {
    std::rethrow_exception(lack);  // nor has XLA
  }
  if (is_new && lasting) keep_inference(key, *inference);
  return recipe;
}

}  // namespace lazyxla::dispatch
