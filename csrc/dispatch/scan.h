// Scan: one pass over an operator's arguments on the dispatcher's stack.
//
// It collects what recording needs: the key of the shape memo, the tensors the node reads, the
// tensors the operator writes, the values of its scalars, and the device. It runs for every
// operator recorded, so it only appends to buffers that keep their memory.
//
// The key is a run of 64-bit words: the OpInfo's key (with torch's default dtype), then for each
// argument a tagged word with a count, and its words; for a tensor its dtype, sizes and strides,
// for a scalar its category. Numbers that decide the result's size are at its end.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

#include <vector>

#include "dispatch/op_info.h"
#include "ir/node.h"

namespace lazyxla::dispatch {

struct Scan {
  c10::SmallVector<uint64_t, 64> key;
  bool numbers_vary = false;                             // as in ir::OpSpec
  size_t numbers_in_key = 0;                             // its last words
  c10::SmallVector<const c10::TensorImpl*, 8> operands;  // lazyxla tensors, in operand order
  c10::SmallVector<c10::TensorImpl*, 4> written;         // in argument order
  c10::SmallVector<ir::ScalarValue, 8> slots;
  c10::SmallVector<ir::SlotSpec, 8> slot_specs;
  c10::DeviceIndex device = -1;
  std::optional<at::Generator> generator;  // as the caller gave it; none: the default one

  // Reads the arguments of one call. Throws PyTorch's error if they are on different devices.
  void run(const OpInfo& info, c10::ArrayRef<c10::IValue> args);

 private:
  void tensor(const OpInfo& info, size_t position, const c10::IValue& value);
  void lazy_tensor(const OpInfo& info, size_t position, c10::TensorImpl* impl);
  void cpu_scalar(const c10::TensorImpl& impl);
  void scalar(const OpInfo& info, size_t position, const c10::IValue& value);
  void complex(c10::complex<double> number, c10::ScalarType dtype, bool wrapped);
  void add_index(int64_t value);
  void fixed(const c10::IValue& value);
  void use_device(const OpInfo& info, size_t position, c10::Device device);
};

// The number in a 0-dim CPU tensor.
c10::Scalar number_of(const c10::TensorImpl& tensor);

}  // namespace lazyxla::dispatch
