// Dtypes that an operator does not take, or not together.
//
// PyTorch's kernels refuse most calls on tensors of several dtypes ("expected m1 and m2 to have the
// same dtype"), and some on integers; its meta functions accept many of them. For some of these
// calls they also return other dtypes than the kernels do. So the CPU's kernel is asked about each
// kind of call on tensors that are not all of one floating-point dtype, or with an out= tensor of
// another dtype than the result's, with tensors that are made up and small.
//
// Its refusal counts only if it is about the dtypes: if it accepts the same call on tensors of
// other dtypes. Else it may refuse what is made up, as it does where a size is among the arguments.
//
// That it has no kernel for the dtypes counts if no program can be lowered for the call either
// (infer.cpp): else it would fail late, in words of the compiler.
#include <algorithm>
#include <set>

#include "dispatch/checks.h"
#include "dispatch/python_error.h"

namespace lazyxla::dispatch {
namespace {

using Args = c10::ArrayRef<c10::IValue>;
using Dtypes = std::vector<c10::ScalarType>;

// Calls on more elements are not made on the CPU for the sake of an error message.
constexpr int64_t kMostElements = 1 << 22;

struct Answer {
  std::exception_ptr lack;  // the CPU has no kernel for these dtypes; XLA may well have one
  std::exception_ptr refusal;
  std::vector<at::Tensor> results;
};

Answer ask(const OpInfo& info, Args args, const CpuCall& how) {
  try {
    return {.results = check_as_cpu(info, args, how)};
  } catch (const c10::NotImplementedError&) {
    return {.lack = std::current_exception()};
  } catch (const std::exception& error) {
    if (is_interruption(error)) throw;
    return {.refusal = std::current_exception()};
  }
}

// The dtypes, but those of out= tensors are the results': some kernels take no others.
Dtypes with_those_of_results(const OpInfo& info, Args args, const Inference& inference,
                             Dtypes dtypes) {
  size_t result = inference.first_written(info.returns), next = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    const ArgInfo& arg = info.args[i];
    if (arg.kind != ArgKind::kTensor && arg.kind != ArgKind::kTensorList) continue;
    std::vector<at::Tensor> tensors;
    flatten(args[i], tensors);
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined() || tensor.is_cpu()) continue;
      const bool is_out = arg.written && !arg.operand && result < inference.results.size();
      if (is_out) dtypes[next] = inference.results[result].geometry.dtype;
      if (arg.written) ++result;
      ++next;
    }
  }
  return dtypes;
}

// Whether the kernel accepts the call if its out= tensors have the results' dtypes (`fitting`), if
// all tensors have one dtype, or if one of them has another.
bool accepts_other_dtypes(const OpInfo& info, Args args, const Dtypes& dtypes,
                          const Dtypes& fitting, CpuCall how) {
  const auto accepts = [&](Dtypes others) {
    how.dtypes = std::move(others);
    const Answer answer = ask(info, args, how);
    return !answer.lack && !answer.refusal;
  };
  constexpr c10::ScalarType kTried[] = {c10::ScalarType::Float, c10::ScalarType::Double,
                                        c10::ScalarType::Long, c10::ScalarType::Bool};
  if (fitting != dtypes && accepts(fitting)) return true;
  for (const c10::ScalarType dtype : kTried) {
    if (accepts(Dtypes(dtypes.size(), dtype))) return true;
  }
  for (size_t i = 0; i < dtypes.size(); ++i) {
    Dtypes others = dtypes;
    for (const c10::ScalarType dtype : {dtypes[0], dtypes.back(), kTried[0], kTried[2]}) {
      others[i] = dtype;
      if (dtype != dtypes[i] && accepts(others)) return true;
    }
  }
  return false;
}

// Whether the tensors can be made smaller: integers among the arguments (a length, a blank's index)
// must be right for the small ones, too, since some kernels do not compare them with the sizes.
bool shrinks(const OpInfo& info, Args args, const std::vector<at::Tensor>& tensors) {
  std::set<int64_t> sizes;
  for (const at::Tensor& tensor : tensors) {
    sizes.insert(tensor.sizes().begin(), tensor.sizes().end());
  }
  const auto fits = [&](int64_t number) {
    return std::abs(number) <= CpuCall::kKept || sizes.count(number) > 0;
  };
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isIntList()) {
      const auto numbers = args[i].toIntVector();
      if (!std::all_of(numbers.begin(), numbers.end(), fits)) return false;
    } else if (args[i].isInt() && !info.args[i].is_dtype && !fits(args[i].toInt())) {
      return false;
    }
  }
  return true;
}

// LAPACK reads and writes the rows that pivots name without a check. The first row is 1.
bool reads_pivots(const OpInfo& info) {
  const auto& arguments = info.handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (info.args[i].operand && arguments[i].name().find("pivots") != std::string::npos) {
      return true;
    }
  }
  return false;
}

// The dtypes that the CPU's kernel is asked with. Running statistics may have one of their own: who
// casts a model's parameters, as FSDP's mixed precision does, leaves its buffers as they are. The
// CPU's kernels take that for some dtypes, CUDA's for all; here it is computed in the wider one.
Dtypes asked_dtypes(const OpInfo& info, Args args, const std::vector<at::Tensor>& tensors) {
  const auto& arguments = info.handle.schema().arguments();
  const auto tensor_called = [&](const char* name) {
    for (size_t i = 0; i < args.size(); ++i) {
      if (arguments[i].name() == name && args[i].isTensor()) return args[i].toTensor();
    }
    return at::Tensor();
  };
  const at::Tensor weight = tensor_called("weight");
  const at::Tensor mean = tensor_called("running_mean"), var = tensor_called("running_var");
  Dtypes dtypes;
  for (const at::Tensor& x : tensors) {
    const bool is_statistic = (x.is_same(mean) || x.is_same(var)) && x.is_floating_point();
    const at::Tensor& like = !is_statistic ? x : weight.defined() ? weight : tensors[0];
    dtypes.push_back(like.scalar_type());
  }
  return dtypes;
}

int64_t elements_of(const std::vector<at::Tensor>& tensors, const Inference& inference) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  for (const auto& result : inference.results) {
    if (result.defined) elements += c10::multiply_integers(result.geometry.sizes);
  }
  return elements;
}

}  // namespace

std::exception_ptr check_dtypes(const OpInfo& info, Args args, Inference& inference) {
  if (info.checks.of_numbers) return nullptr;  // the CPU's kernel would convert the numbers, too
  if (info.checks.dtypes_by_meta) return nullptr;
  // Autograd calls these, with what the forward operator returned: its statistics of a bfloat16
  // input are float32 here, as on CUDA.
  if (info.functional_name.find("backward") != std::string::npos) return nullptr;
  const std::vector<at::Tensor> tensors = device_tensors(info, args);
  const Dtypes dtypes = asked_dtypes(info, args, tensors);
  const Dtypes fitting = with_those_of_results(info, args, inference, dtypes);
  const bool is_one =
      std::adjacent_find(dtypes.begin(), dtypes.end(), std::not_equal_to<>()) == dtypes.end();
  const bool was_asked = info.checks.on_cpu_with.has_value();
  // Its program calls the CPU's kernel, which has most operators for wide floats only.
  const bool is_called = info.lowering_kind == LoweringKind::kHostCall;
  const bool is_usual = is_one && (was_asked || dtypes.empty() ||
                                   (fitting == dtypes && c10::isFloatingType(dtypes[0]) &&
                                    !(is_called && c10::isReducedFloatingType(dtypes[0]))));
  if (is_usual) return nullptr;
  const int fill = reads_pivots(info) ? 1 : info.checks.on_cpu_with.value_or(0);
  CpuCall how{.fill = fill, .shrink_integers = true, .dtypes = dtypes};
  const bool is_affordable = elements_of(tensors, inference) <= kMostElements;
  Answer answer;
  bool is_conclusive = false;
  for (how.shrink = shrinks(info, args, tensors); !is_conclusive; how.shrink = false) {
    if (!how.shrink && !is_affordable) return nullptr;
    answer = ask(info, args, how);
    is_conclusive = !answer.refusal || accepts_other_dtypes(info, args, dtypes, fitting, how);
    if (!is_conclusive && !how.shrink) return nullptr;
  }
  if (answer.refusal) std::rethrow_exception(answer.refusal);
  if (answer.lack && is_called) std::rethrow_exception(answer.lack);
  if (answer.lack) return answer.lack;
  if (info.writes || answer.results.size() != inference.results.size()) return nullptr;
  for (size_t i = 0; i < answer.results.size(); ++i) {
    if (!answer.results[i].defined()) continue;
    inference.results[i].geometry.dtype = answer.results[i].scalar_type();
  }
  return nullptr;
}

}  // namespace lazyxla::dispatch
