#include "dispatch/dtype_checks.h"

#include <algorithm>
#include <exception>

#include "dispatch/python_error.h"

namespace lazyxla::dispatch {
namespace {

using Args = c10::ArrayRef<c10::IValue>;
using Dtypes = std::vector<c10::ScalarType>;

// Calls on more elements are not made on the CPU for the sake of an error message.
constexpr int64_t kMostElements = 1 << 22;

struct Answer {
  bool is_known = true;  // else the CPU has no kernel for these dtypes; XLA may well have one
  std::exception_ptr refusal;
  std::vector<at::Tensor> results;
};

Answer ask(const OpInfo& info, Args args, const CpuCall& how) {
  try {
    return {.results = check_as_cpu(info, args, how)};
  } catch (const c10::NotImplementedError&) {
    return {.is_known = false};
  } catch (const std::exception& error) {
    if (is_interruption(error)) throw;
    return {.refusal = std::current_exception()};
  }
}

// Whether the kernel accepts the call if all tensors have one dtype, or one of them has another.
bool accepts_other_dtypes(const OpInfo& info, Args args, const Dtypes& dtypes, CpuCall how) {
  const auto accepts = [&](Dtypes others) {
    how.dtypes = std::move(others);
    const Answer answer = ask(info, args, how);
    return answer.is_known && !answer.refusal;
  };
  constexpr c10::ScalarType kTried[] = {c10::ScalarType::Float, c10::ScalarType::Double,
                                        c10::ScalarType::Long, c10::ScalarType::Bool};
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

int64_t elements_of(const std::vector<at::Tensor>& tensors, const Inference& inference) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  for (const auto& result : inference.results) {
    if (result.defined) elements += c10::multiply_integers(result.geometry.sizes);
  }
  return elements;
}

}  // namespace

void check_dtypes(const OpInfo& info, Args args, Inference& inference) {
  if (info.checks.of_numbers) return;  // the CPU's kernel would convert the numbers, too
  const std::vector<at::Tensor> tensors = device_tensors(info, args);
  Dtypes dtypes;
  for (const at::Tensor& tensor : tensors) dtypes.push_back(tensor.scalar_type());
  const bool is_one =
      std::adjacent_find(dtypes.begin(), dtypes.end(), std::not_equal_to<>()) == dtypes.end();
  const bool was_asked = info.checks.on_cpu_with.has_value();
  if (is_one && (was_asked || dtypes.empty() || c10::isFloatingType(dtypes[0]))) return;
  CpuCall how{.fill = info.checks.on_cpu_with.value_or(0), .shrink = true, .shrink_lists = true};
  Answer answer = ask(info, args, how);
  if (answer.refusal && !accepts_other_dtypes(info, args, dtypes, how)) {
    if (elements_of(tensors, inference) > kMostElements) return;
    how.shrink = false;
    answer = ask(info, args, how);
    if (answer.refusal && !accepts_other_dtypes(info, args, dtypes, how)) return;
  }
  if (answer.refusal) std::rethrow_exception(answer.refusal);
  if (!answer.is_known || info.writes || answer.results.size() != inference.results.size()) return;
  for (size_t i = 0; i < answer.results.size(); ++i) {
    if (!answer.results[i].defined()) continue;
    inference.results[i].geometry.dtype = answer.results[i].scalar_type();
  }
}

}  // namespace lazyxla::dispatch
