#include "dispatch/unboxed.h"

#include <array>
#include <string>
#include <unordered_map>

#include "dispatch/recorder.h"

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using c10::IValue;
using c10::Scalar;

// The arguments as IValues that do not own their tensors, for as long as the call lasts.
template <size_t N>
class Borrowed {
 public:
  template <typename... Args>
  explicit Borrowed(const Args&... args) : values_{borrow(args)...} {}
  ~Borrowed() {
    for (IValue& value : values_) {
      if (value.isTensor()) std::move(value).toTensor().unsafeReleaseTensorImpl();
    }
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  operator c10::ArrayRef<IValue>() const { return values_; }

 private:
  using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static IValue borrow(const Tensor& tensor) {
    return Tensor(Impl::reclaim(tensor.unsafeGetTensorImpl()));
  }
  static IValue borrow(const Scalar& number) { return number; }

  std::array<IValue, N> values_;
};

template <typename... Args>
torch::CppFunction functional(const OpInfo& info) {
  return torch::CppFunction(
      [&info](Args... args) -> Tensor { return record(info, Borrowed<sizeof...(Args)>(args...)); });
}

template <typename... Args>
torch::CppFunction in_place(const OpInfo& info) {
  return torch::CppFunction([&info](Tensor& self, Args... args) -> Tensor& {
    record(info, Borrowed<1 + sizeof...(Args)>(self, args...));
    return self;
  });
}

// A letter for each argument: T a tensor, W one that is written and returned, N a number.
std::string signature(const OpInfo& info) {
  const c10::FunctionSchema& schema = info.handle.schema();
  const auto& returns = schema.returns();
  if (returns.size() != 1 || returns[0].type()->kind() != c10::TypeKind::TensorType) return "";
  std::string letters;
  for (const c10::Argument& argument : schema.arguments()) {
    const auto kind = argument.type()->kind();
    const c10::AliasInfo* alias = argument.alias_info();
    if (kind == c10::TypeKind::NumberType) {
      letters += 'N';
    } else if (kind == c10::TypeKind::TensorType && (!alias || alias->isWrite())) {
      letters += alias ? 'W' : 'T';
    } else {
      return "";
    }
  }
  return letters;
}

}  // namespace

std::optional<torch::CppFunction> unboxed_kernel(const OpInfo& info) {
  using T = const Tensor&;
  using N = const Scalar&;
  using Make = torch::CppFunction (*)(const OpInfo&);
  static const auto* makers = new std::unordered_map<std::string, Make>{
      {"T", &functional<T>},
      {"TN", &functional<T, N>},
      {"TNN", &functional<T, N, N>},
      {"TT", &functional<T, T>},
      {"TTN", &functional<T, T, N>},
      {"TTT", &functional<T, T, T>},
      {"TTTN", &functional<T, T, T, N>},
      {"TTTNN", &functional<T, T, T, N, N>},
      {"W", &in_place<>},
      {"WN", &in_place<N>},
      {"WNN", &in_place<N, N>},
      {"WT", &in_place<T>},
      {"WTN", &in_place<T, N>},
      {"WTT", &in_place<T, T>},
      {"WTTN", &in_place<T, T, N>},
  };
  const auto found = makers->find(signature(info));
  if (found == makers->end()) return {};
  return found->second(info);
}

}  // namespace lazyxla::dispatch
