#include "dispatch/host.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from_and_resize.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "common/counters.h"
#include "common/hash.h"
#include "common/options.h"
#include "common/user_line.h"
#include "dispatch/device_state.h"
#include "dispatch/generator.h"
#include "dispatch/overlap.h"
#include "dispatch/plain_call.h"
#include "record/capture.h"
#include "record/scope.h"

namespace lazyxla::dispatch {
namespace {

// The host kernel cannot draw from our generator; it gets one seeded from ours.
void replace_generators(const OpInfo& info, torch::jit::Stack* stack) {
  size_t first = stack->size() - info.args.size();
  for (size_t i = 0; i < info.args.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (info.args[i].kind != ArgKind::kGenerator || value.isNone()) continue;
    const auto [seed, ordinal] = at::check_generator<Generator>(value.toGenerator())->draw();
    const std::array<uint64_t, 2> key{seed, ordinal};
    value = at::make_generator<at::CPUGeneratorImpl>(hash_words(key.data(), key.size()));
  }
}

// Whether the shape of the result depends on the data, as that of nonzero.
bool is_data_dependent(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
}

// Whether it reads data by its nature: such an operator, or one of PyTorch's that returns and
// writes nothing, such as an assertion, which can only look at its arguments.
bool reads_data(const OpInfo& info) {
  const bool only_looks = info.returns.empty() && !info.writes && info.name.starts_with("aten::");
  return only_looks || is_data_dependent(info.handle);
}

// The types of the tensors that the operator (or with `functional`, its counterpart) reads.
std::string describe_arguments(const OpInfo& info, c10::ArrayRef<c10::IValue> values,
                               bool functional) {
  std::ostringstream text;
  const char* separator = "";
  for (size_t i = 0; i < info.args.size(); ++i) {
    if (functional && !info.args[i].operand) continue;
    std::vector<at::Tensor> tensors;
    flatten(values[i], tensors);
    for (const at::Tensor& tensor : tensors) {
      if (!tensor.defined()) continue;
      text << separator << tensor.scalar_type() << tensor.sizes();
      separator = ", ";
    }
  }
  return text.str();
}

// The fallback copies results to the written tensors: they must be on this device, and must not
// share memory with what is read, which the copies would hide.
void check_written(const OpInfo& info, c10::ArrayRef<c10::IValue> values) {
  if (!info.writes || !info.name.starts_with("aten::")) return;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < info.args.size(); ++i) {
    if (info.args[i].written) flatten(values[i], tensors);
  }
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(!tensor.defined() || tensor.device().type() == kDeviceType,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                c10::Device(kDeviceType, current_device()), " and ", tensor.device(), "! (",
                info.name, " writes to the latter)");
  }
  check_overlap_on_host(info, values);
}

[[noreturn]] void refuse(const std::string& call, const std::string& why) {
  C10_THROW_ERROR(NotImplementedError, "lazyxla: " + user_line_prefix() + call + " " + why);
}

// Throws where no operator may run on the host.
void check_may_run(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const char* why) {
  record::check_unbroken(info.name + " runs on the host");
  TORCH_CHECK(!record::Capture::current(), "lazyxla.aot: ", user_line_prefix(), info.name, "(",
              describe_arguments(info, args, /*functional=*/false), ") ",
              is_data_dependent(info.handle) ? "has a result whose shape depends on values" : why,
              " and would run on the host, but a program that is compiled without being run has no "
              "values");
  check_written(info, args);
}

// Counts it, and tells of the operator's first. Throws in strict mode.
void report_fallback(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const char* why) {
  if (reads_data(info)) {  // no lowering can exist: this is how such operators run
    ++Counters::get().data_dependent;
    return;
  }
  if (options().strict_fallback) {
    refuse(info.name + "(" + describe_arguments(info, args, /*functional=*/false) + ")",
           std::string(why) +
               " and would run on the host; strict mode (LAZYXLA_STRICT) makes this an error");
  }
  if (!info.warned.exchange(true)) {
    TORCH_WARN("lazyxla: ", info.name, " ", why,
               " and runs on the host: everything recorded is run first, and the data is copied "
               "there and back. Further calls are only counted "
               "(lazyxla.fallbacks()); LAZYXLA_STRICT=1 makes them errors.");
  }
  Counters::get().count_fallback(info.name);
}

// The tensors of a call, on the host. One that is given twice is one there, too: some kernels ask
// whether they write to what they read.
class HostCopies {
 public:
  at::Tensor of(const at::Tensor& x) {
    if (!x.defined() || x.is_cpu()) return x;
    for (const auto& [original, copy] : copies_) {
      if (original.is_same(x)) return copy;
    }
    copies_.emplace_back(x, x.to(at::kCPU));
    return copies_.back().second;
  }

  c10::IValue of(const c10::IValue& value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isDevice()) return c10::Device(at::kCPU);
    if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, of(list.get(i)));
    return list;
  }

  // A result, on the device: an argument, if the kernel returned what is its copy.
  at::Tensor original(const at::Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& [original, copy] : copies_) {
      if (copy.is_same(result)) return original;
    }
    return copies_.empty() ? result : result.to(copies_[0].first.device());
  }

  c10::IValue original(const c10::IValue& value) const {
    if (value.isTensor()) return original(value.toTensor());
    if (!value.isTensorList()) return value;
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, original(list.get(i)));
    return list;
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace

void check_host_call_allowed(const OpInfo& info, c10::ArrayRef<c10::IValue> args) {
  if (!options().strict_host_calls) return;
  // PyTorch calls the out= form of some operators: the program is given the functional one.
  refuse(info.functional_name + "(" + describe_arguments(info, args, /*functional=*/true) + ")",
         "would run on the host, called by the program; strict mode (LAZYXLA_STRICT_HOST_CALLS) "
         "makes this an error");
}

void run_on_host(const OpInfo& info, torch::jit::Stack* stack, const char* why) {
  const auto args = torch::jit::last(*stack, info.args.size());
  check_may_run(info, args, why);
  report_fallback(info, args, why);
  replace_generators(info, stack);
  at::native::cpu_fallback(info.handle, stack);
}

void run_checked_on_host(const OpInfo& info, torch::jit::Stack* stack, const char* why,
                         c10::DispatchKey key) {
  const auto given = torch::jit::last(*stack, info.args.size());
  const std::vector<c10::IValue> args(given.begin(), given.end());
  check_may_run(info, args, why);
  replace_generators(info, stack);
  HostCopies copies;
  std::transform(args.begin(), args.end(), stack->end() - static_cast<int64_t>(args.size()),
                 [&](const c10::IValue& value) { return copies.of(value); });
  info.handle.redispatchBoxed(c10::DispatchKeySet(key), stack);
  report_fallback(info, args, why);
  for (size_t i = 0; i < args.size(); ++i) {
    if (!info.args[i].written) continue;
    std::vector<at::Tensor> tensors;
    flatten(args[i], tensors);
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined()) at::_copy_from_and_resize(copies.of(tensor), tensor);
    }
  }
  const auto results = stack->end() - static_cast<int64_t>(info.returns.size());
  std::transform(results, stack->end(), results,
                 [&](const c10::IValue& value) { return copies.original(value); });
}

}  // namespace lazyxla::dispatch
