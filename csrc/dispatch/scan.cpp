#include "dispatch/scan.h"

#include <c10/core/Scalar.h>

#include <bit>
#include <cstring>

#include "dispatch/device_state.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using c10::ScalarType;

enum Tag : uint64_t {
  kNone = uint64_t{1} << 56,
  kTensorTag = uint64_t{2} << 56,
  kScalarTag = uint64_t{3} << 56,
  kListTag = uint64_t{4} << 56,
  kIntTag = uint64_t{5} << 56,
  kBoolTag = uint64_t{6} << 56,
  kStringTag = uint64_t{7} << 56,
  kFixedTag = uint64_t{8} << 56,
  kIndexTag = uint64_t{9} << 56,
};

uint64_t scalar_word(const ir::SlotSpec& spec) {
  return kScalarTag | (static_cast<uint64_t>(spec.dtype) << 8) | (spec.wrapped ? 2 : 0) |
         (spec.kind == ir::SlotKind::kInt ? 1 : 0);
}

}  // namespace

c10::Scalar number_of(const c10::TensorImpl& tensor) {
  const void* data = tensor.data();
  switch (c10::typeMetaToScalarType(tensor.dtype())) {
#define LAZYXLA_CASE(ctype, name) \
  case ScalarType::name:          \
    return c10::Scalar(*static_cast<const ctype*>(data));
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX(LAZYXLA_CASE)
    LAZYXLA_CASE(uint16_t, UInt16)
    LAZYXLA_CASE(uint32_t, UInt32)
    LAZYXLA_CASE(uint64_t, UInt64)
#undef LAZYXLA_CASE
    default:
      TORCH_CHECK_TYPE(false, "lazyxla: a CPU scalar of dtype ", tensor.dtype(),
                       " cannot take part in a device operator");
  }
}

void Scan::run(const OpInfo& info, c10::ArrayRef<IValue> args) {
  key.clear();
  operands.clear();
  written.clear();
  slots.clear();
  slot_specs.clear();
  device = -1;
  generator.reset();
  numbers_vary = info.scales && record::in_optimizer_step();
  // An address leaves the upper bits free, and the settings the uppermost one.
  key.push_back(info.memo_key.load(std::memory_order_relaxed) |
                static_cast<uint64_t>(record::record_settings()) << 48 |
                static_cast<uint64_t>(numbers_vary) << 63);
  for (size_t i = 0; i < args.size(); ++i) {
    const IValue& value = args[i];
    switch (info.args[i].kind) {
      case ArgKind::kTensor:
        tensor(info, i, value);
        break;
      case ArgKind::kTensorList:
        if (value.isNone()) {
          key.push_back(kNone);
          break;
        }
        key.push_back(kListTag | value.toListRef().size());
        for (const IValue& element : value.toListRef()) tensor(info, i, element);
        break;
      case ArgKind::kScalar:
        scalar(info, i, value);
        break;
      case ArgKind::kScalarList:
        if (value.isNone()) {
          key.push_back(kNone);
        } else {
          key.push_back(kListTag | value.toListRef().size());
          for (const IValue& element : value.toListRef()) scalar(info, i, element);
        }
        break;
      case ArgKind::kIndex:
        if (value.isNone()) {
          key.push_back(kNone);
        } else {
          add_index(value.toInt());
        }
        break;
      case ArgKind::kIndexList: {
        const auto list = value.toIntList();
        key.push_back(kListTag | list.size());
        for (int64_t element : list) add_index(element);
        break;
      }
      case ArgKind::kGenerator:
        if (!value.isNone()) generator = value.toGenerator();
        break;
      case ArgKind::kDevice:
        if (info.factory && value.isDevice()) {
          device = resolve_index(value.toDevice().index());
        }
        break;
      case ArgKind::kStatic:
        fixed(value);
        break;
    }
  }
  if (device < 0) device = current_device();
  numbers_in_key = info.sized_by_numbers ? slots.size() : 0;
  for (size_t i = 0; i < numbers_in_key; ++i) key.push_back(static_cast<uint64_t>(slots[i].i));
}

void Scan::add_index(int64_t value) {
  const bool is_narrow = value == static_cast<int32_t>(value);
  slot_specs.push_back({.dtype = ScalarType::Long,
                        .wrapped = true,
                        .kind = ir::SlotKind::kIndex,
                        .narrow = is_narrow});
  slots.push_back({.i = value});
  key.push_back(kIndexTag | (is_narrow ? 1 : 0));
}

void Scan::tensor(const OpInfo& info, size_t position, const IValue& value) {
  c10::TensorImpl* impl = value.isTensor() ? value.unsafeToTensorImpl() : nullptr;
  if (!impl || impl == c10::UndefinedTensorImpl::singleton()) {
    key.push_back(kNone);
    return;
  }
  if (impl->device_type() == kDeviceType) {
    lazy_tensor(info, position, impl);
    return;
  }
  // PyTorch lets a CPU scalar meet tensors of any device; everything else must be on one.
  if (impl->dim() == 0 && impl->device_type() == c10::DeviceType::CPU &&
      !info.args[position].written) {
    cpu_scalar(*impl);
    return;
  }
  use_device(info, position, impl->device());
}

void Scan::lazy_tensor(const OpInfo& info, size_t position, c10::TensorImpl* impl) {
  use_device(info, position, impl->device());
  const ArgInfo& arg = info.args[position];
  if (arg.written) written.push_back(impl);
  if (arg.operand) operands.push_back(impl);
  auto sizes = impl->sizes();
  auto strides = impl->strides();
  key.push_back(kTensorTag |
                (static_cast<uint64_t>(c10::typeMetaToScalarType(impl->dtype())) << 8) |
                (impl->is_wrapped_number() ? 1 << 16 : 0) | (sizes.size() << 24));
  key.append(sizes.begin(), sizes.end());
  key.append(strides.begin(), strides.end());
}

void Scan::use_device(const OpInfo& info, size_t position, c10::Device where) {
  if (where.type() == kDeviceType) {
    if (device < 0) device = where.index();
    if (device == where.index()) return;
  }
  TORCH_CHECK(false,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              c10::Device(kDeviceType, device < 0 ? current_device() : device), " and ", where,
              "! (when checking argument for argument ",
              info.handle.schema().arguments()[position].name(), " in method ", info.name, ")");
}

void Scan::cpu_scalar(const c10::TensorImpl& impl) {
  c10::Scalar number = number_of(impl);
  ir::SlotSpec spec{c10::typeMetaToScalarType(impl.dtype()), impl.is_wrapped_number(),
                    number.isFloatingPoint() ? ir::SlotKind::kFloat : ir::SlotKind::kInt};
  if (number.isComplex()) {
    complex(number.toComplexDouble(), spec.dtype, spec.wrapped);
    return;
  }
  if (number.type() == ScalarType::UInt64) {  // beyond int64
    key.push_back(kFixedTag | (static_cast<uint64_t>(spec.dtype) << 8) | (spec.wrapped ? 2 : 0));
    key.push_back(number.toUInt64());
    return;
  }
  key.push_back(scalar_word(spec));
  slot_specs.push_back(spec);
  slots.push_back(spec.kind == ir::SlotKind::kFloat ? ir::ScalarValue{.f = number.toDouble()}
                                                    : ir::ScalarValue{.i = number.toLong()});
}

void Scan::scalar(const OpInfo& info, size_t position, const IValue& value) {
  const bool optional = info.args[position].optional;
  if (value.isDouble() && !info.numbers_are_static) {
    slot_specs.push_back({ScalarType::Double, true, ir::SlotKind::kFloat, optional});
    slots.push_back({.f = value.toDouble()});
    key.push_back(scalar_word(slot_specs.back()));
  } else if ((value.isInt() || value.isBool()) && !info.numbers_are_static) {
    const bool is_bool = value.isBool();
    slot_specs.push_back(
        {is_bool ? ScalarType::Bool : ScalarType::Long, true, ir::SlotKind::kInt, optional});
    slots.push_back({.i = is_bool ? int64_t{value.toBool()} : value.toInt()});
    key.push_back(scalar_word(slot_specs.back()));
  } else if (value.isComplexDouble() && !info.numbers_are_static) {
    complex(value.toComplexDouble(), ScalarType::ComplexDouble, /*wrapped=*/true);
  } else {
    fixed(value);
  }
}

// Two slots, so that each part is a constant until it varies.
void Scan::complex(c10::complex<double> number, ScalarType dtype, bool wrapped) {
  slot_specs.push_back({dtype, wrapped, ir::SlotKind::kFloat});
  // PyTorch takes a complex number for a real one where it is one, which raises errors elsewhere.
  const bool is_real = number.imag() == 0;
  key.push_back(scalar_word(slot_specs.back()) | (is_real ? 4 : 0));
  slot_specs.push_back({ScalarType::Double, wrapped, ir::SlotKind::kFloat});
  slots.push_back({.f = number.real()});
  slots.push_back({.f = number.imag()});
}

// A value that is part of the key as it is.
void Scan::fixed(const IValue& value) {
  if (value.isNone()) {
    key.push_back(kNone);
  } else if (value.isInt()) {
    key.push_back(kIntTag);
    key.push_back(static_cast<uint64_t>(value.toInt()));
  } else if (value.isBool()) {
    key.push_back(kBoolTag | (value.toBool() ? 1 : 0));
  } else if (value.isDouble()) {
    key.push_back(kFixedTag | 1);
    key.push_back(std::bit_cast<uint64_t>(value.toDouble()));
  } else if (value.isComplexDouble()) {
    auto c = value.toComplexDouble();
    key.push_back(kFixedTag | 2);
    key.push_back(std::bit_cast<uint64_t>(c.real()));
    key.push_back(std::bit_cast<uint64_t>(c.imag()));
  } else if (value.isUnsigned()) {
    key.push_back(kFixedTag | 3);
    key.push_back(value.toUInt());
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    key.push_back(kStringTag | text.size());
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
      key.push_back(word);
    }
  } else if (value.isIntList()) {
    auto list = value.toIntList();
    key.push_back(kListTag | list.size());
    for (int64_t element : list) key.push_back(static_cast<uint64_t>(element));
  } else if (value.isList()) {
    auto list = value.toListRef();
    key.push_back(kListTag | list.size());
    for (const IValue& element : list) fixed(element);
  } else {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "lazyxla: cannot record an argument of type ",
                                value.tagKind());
  }
}

}  // namespace lazyxla::dispatch
