// Checks of arguments that meta functions leave to kernels.
//
// PyTorch's errors have three sources: meta functions, CPU kernels, and code that both share. What
// only a kernel checks would go unnoticed here, where no kernel sees the call. So the CPU kernel is
// called, with as little data as suffices (check_as_cpu), or the few checks that need all of the
// sizes are made in Python (lazyxla/argument_checks). A call with an empty tensor is little data
// already, and most errors of kernels about sizes occur only then: the CPU kernel is always called,
// as it is for factories of few elements (check_small).
//
// Shape inference does not remember numbers. Where an operator's kernel checks them (the sigma of a
// distribution, a value that an integer dtype cannot hold), check_numbers asks the CPU about each
// combination that it has not seen: tens of microseconds for a new number, a look-up for a known
// one, nothing for all other operators.
#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <string>
#include <unordered_map>

#include "dispatch/inference_store.h"
#include "dispatch/op_info.h"
#include "dispatch/plain_call.h"
#include "dispatch/scan.h"

namespace lazyxla::dispatch {

// lazyxla/argument_checks, by the names of functional forms. Once, before operators are registered.
void set_argument_checks(std::unordered_map<std::string, Checks> checks);

// Fills in `info.checks`. Once per operator, when all else of `info` is known.
void find_checks(OpInfo& info);

// How the CPU kernel is called.
struct CpuCall {
  static constexpr int64_t kKept = 4;  // sizes up to this one stay

  int fill = 0;         // what the tensors are filled with
  bool shrink = false;  // sizes of calls with many elements become small ones
  bool share = false;   // what lies in the same memory does so on the CPU, too; with `shrink`, only
                        // tensors that are the same elements
  bool shrink_integers = false;         // with `shrink`: integers that are sizes, too
  std::vector<c10::ScalarType> dtypes;  // of the device's tensors, in place of their own; or empty
};

// An argument with other tensors in place of its own, as `map` gives them, with a device of that
// type, and without a generator.
template <typename Map>
c10::IValue with_tensors(const c10::IValue& value, ArgKind kind, c10::DeviceType device, Map map) {
  switch (kind) {
    case ArgKind::kTensor:
      return is_tensor(value) ? c10::IValue(map(value.toTensor())) : value;
    case ArgKind::kTensorList: {
      if (value.isNone()) return value;
      const c10::IValue none = value.isTensorList() ? c10::IValue(at::Tensor()) : c10::IValue();
      c10::impl::GenericList list(value.toList().elementType());
      for (const c10::IValue& element : value.toListRef()) {
        list.push_back(is_tensor(element) ? c10::IValue(map(element.toTensor())) : none);
      }
      return list;
    }
    case ArgKind::kGenerator:
      return c10::IValue();
    case ArgKind::kDevice:
      return c10::Device(device);
    default:
      return value;
  }
}

// The arguments that are tensors on the device, in order.
std::vector<at::Tensor> device_tensors(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// Calls the operator's CPU kernel on made-up tensors, to hear its objections. Returns its results.
// One that would draw from the CPU's default generator is not called: it is the user's, and another
// thread may be drawing from it, too.
std::vector<at::Tensor> check_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                                     const CpuCall& how);

// Whether a call can be made on the CPU just for an error message: it is small enough, and is not
// one of a backward kernel without elements, of which some crash (those of batch_norm and pdist).
bool can_ask_cpu(const OpInfo& info, const Scan& scan);

// Refuses numbers that PyTorch cannot pass to a kernel in a list, where it takes those below -2**62
// for symbols; and tensor options that a factory function cannot have here.
void check_static(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// If an operand has no elements, or there is none and the results are small: calls the operator's
// CPU kernel on tensors of the same sizes, to raise its errors. `inference` is the answer of the
// meta functions.
void check_small(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const Scan& scan,
                 const Inference& inference);

// Asks the CPU's kernel whether the operator takes such dtypes (dtype_checks.cpp). Throws what that
// throws, but for the error that it has no kernel for them: that is returned, since XLA may have
// one. Corrects the dtypes of the results; `inference` is the answer of the meta functions.
std::exception_ptr check_dtypes(const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                                Inference& inference);

// To be called for every call. `key_hash` is that of the scan's key.
void check_numbers(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const Scan& scan,
                   uint64_t key_hash);

// Throws, or warns, if deterministic algorithms are asked for and the operator's CPU kernel says
// that it has none. To be called for every call.
void check_deterministic(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

// Gives the warnings of the operator's CPU kernel. To be called for every call that is in order.
void give_warnings(const OpInfo& info, c10::ArrayRef<c10::IValue> args, const Scan& scan,
                   uint64_t key_hash);

}  // namespace lazyxla::dispatch
