// OpInfo: what the recorder knows of an operator, all of it read off the operator's schema.
//
// For every argument: what kind it is, and whether the operator writes it. For an operator that
// writes (in-place, out=, or mutating some arguments): its functional counterpart, and the source
// of each of the counterpart's arguments. Recording such an operator is recording the counterpart
// and assigning its results:
//
//     add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
//     add.Tensor (Tensor     self, Tensor other, *, Scalar alpha=1) -> Tensor
//
//     arange.start_out(Scalar start, Scalar end, Scalar step, *, Tensor(a!) out) -> Tensor(a!)
//     arange.start_step(Scalar start, Scalar end, Scalar step, *, dtype, layout, device,
//     pin_memory)
//
// An OpInfo is made once per operator and never freed.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lazyxla::dispatch {

enum class ArgKind : uint8_t {
  kTensor,      // Tensor, Tensor?
  kTensorList,  // Tensor[], Tensor?[]
  kScalar,      // Scalar, Scalar?, float, float?
  kScalarList,  // Scalar[], float[]
  kIndex,       // int, int?: one that no shape depends on, and that the rule takes as a value
  kIndexList,   // int[]: likewise
  kGenerator,
  kDevice,
  kStatic,  // everything else: int, int[], bool, str, ScalarType, ...
};

struct OpInfo;

// Which checks of its arguments an operator needs beyond those of its meta function: see checks.h.
struct Checks {
  // One of lazyxla/argument_checks. `sizes` are the first result's, if they are known.
  using Check = std::function<void(const OpInfo& info, c10::ArrayRef<c10::IValue> args,
                                   c10::IntArrayRef sizes)>;

  std::optional<int> on_cpu_with;  // the element that suffices for the CPU kernel
  bool dtypes_by_meta = false;     // the meta functions refuse what the CPU kernel does
  Check before, after;             // of sizes, dtypes and static arguments; or empty
  // When numbers have to be checked, though shape inference does not depend on them.
  enum When : uint8_t { kNever, kOfIntegers, kAlways } numbers = kNever;
  Check of_numbers;  // instead of asking the CPU; or empty
  Check of_values;   // of tensors, if the setting is on; or empty
  // What the kernel warns of, given sizes and numbers; or empty.
  std::function<std::vector<std::string>(const OpInfo& info, c10::ArrayRef<c10::IValue> args)>
      warnings;
};

struct ArgInfo {
  ArgKind kind;
  bool written = false;   // the operator changes this tensor (or these tensors)
  bool operand = true;    // the functional counterpart reads its elements
  bool is_dtype = false;  // kStatic holding a ScalarType
  bool optional = false;  // has a default
};

// The source of an argument of the functional counterpart.
struct ArgSource {
  enum Kind : uint8_t { kArgument, kDefault, kDtypeOfOut, kDeviceOfOut } kind;
  int position = -1;      // kArgument: in the operator's own arguments; k...OfOut: the out argument
  int out = -1;           // kArgument: the out argument whose dtype counts if none is given
  c10::IValue value;      // kDefault
  bool is_dtype = false;  // as in ArgInfo
};

// How an operator is lowered.
enum class LoweringKind : uint8_t {
  kUnknown,
  kRule,           // by a rule of ours
  kDecomposition,  // by a decomposition, whose parts have rules or not: each kind of call is
                   // checked
  kHostCall,       // the program calls the CPU's kernel
  kHost,           // not at all
};

struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& op) : handle(op), functional(op) {}

  c10::OperatorHandle handle;
  std::string name;  // "aten::add_.Tensor"
  std::vector<ArgInfo> args;
  bool writes = false;
  bool writes_list = false;         // a _foreach_ operator: its kernel has to bump version counters
  bool reads_written = false;       // in place: its counterpart reads what is written
  bool may_overlap = false;         // it may write to a tensor whose elements share memory
  bool random = false;              // draws from a generator
  bool collective = false;          // exchanges data with other processes
  bool spreads = false;             // its lowering may say how values are spread over a mesh
  bool factory = false;             // the functional form takes no tensor
  bool sized_by_numbers = false;    // scalars decide the result's size, but are values to the rule
  bool scales = false;              // its scalars are added, or multiplied by
  bool numbers_are_static = false;  // scalars may decide anything
  Checks checks;
  // The operator whose rule lowers this one: itself, or the functional counterpart.
  c10::OperatorHandle functional;
  std::string functional_name;
  std::vector<ArgSource> functional_args;
  bool recordable = true;  // false if it writes and no functional counterpart was found
  // How it lowers, as Python answered when it was first asked.
  mutable std::atomic<LoweringKind> lowering_kind{LoweringKind::kUnknown};
  // Identifies this operator in the shape memo's keys; changes when its rule changes.
  mutable std::atomic<uint64_t> memo_key{reinterpret_cast<uint64_t>(this)};
  mutable std::atomic<bool> warned{false};  // whether its host fallback was announced
  // A user's rule lowers it, so that PyTorch's kernel may compute something else.
  std::atomic<bool> has_users_rule{false};
  // Per return: the position of the written argument it is, or -1 for a fresh result.
  std::vector<int> returns;

  ArgKind kind_of(const ArgSource& source) const {
    if (source.kind == ArgSource::kArgument) return args[source.position].kind;
    return source.kind == ArgSource::kDeviceOfOut ? ArgKind::kDevice : ArgKind::kStatic;
  }

  // The operator's info, made on first use. Thread-safe.
  static OpInfo& of(const c10::OperatorHandle& op);

  // Forgets how operator `name` lowers, and all operators whose functional counterpart it is: its
  // rule has changed.
  static void forget_lowering_kind(const std::string& name);
};

// Whether autograd calls it for the gradients of another operator.
inline bool is_backward(const OpInfo& info) {
  return info.functional_name.find("_backward") != std::string::npos;
}

// "aten::add.Tensor"; the default overload has no dot.
std::string qualified_name(const c10::OperatorName& name);

inline bool is_among(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace lazyxla::dispatch
