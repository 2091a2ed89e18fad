#include "dispatch/host.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/native/CPUFallback.h>

#include <array>

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

// Counts it, and tells of the operator's first. Throws in strict mode.
void report_fallback(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const char* why) {
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

}  // namespace

void check_host_call_allowed(const OpInfo& info, c10::ArrayRef<c10::IValue> args) {
  if (!options().strict_host_calls) return;
  // PyTorch calls the out= form of some operators: the program is given the functional one.
  refuse(info.functional_name + "(" + describe_arguments(info, args, /*functional=*/true) + ")",
         "would run on the host, called by the program; strict mode (LAZYXLA_STRICT_HOST_CALLS) "
         "makes this an error");
}

void run_on_host(const OpInfo& info, torch::jit::Stack* stack, const char* why,
                 c10::DispatchKey key) {
  record::check_unbroken(info.name + " runs on the host");
  const auto args = torch::jit::last(*stack, info.args.size());
  TORCH_CHECK(!record::Capture::current(), "lazyxla.aot: ", user_line_prefix(), info.name, "(",
              describe_arguments(info, args, /*functional=*/false), ") ",
              is_data_dependent(info.handle) ? "has a result whose shape depends on values" : why,
              " and would run on the host, but a program that is compiled without being run has no "
              "values");
  check_written(info, args);
  if (reads_data(info)) {  // no lowering can exist: this is how such operators run
    ++Counters::get().data_dependent;
  } else {
    report_fallback(info, args, why);
  }
  replace_generators(info, stack);
  at::native::cpu_fallback(info.handle, stack, /*error_on_views=*/false, key);
}

}  // namespace lazyxla::dispatch
