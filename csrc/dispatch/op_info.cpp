#include "dispatch/op_info.h"

#include <ATen/core/enum_tag.h>

#include <memory>
#include <unordered_map>

#include "common/locks.h"
#include "dispatch/checks.h"

namespace lazyxla::dispatch {
namespace {

using c10::Argument;
using c10::FunctionSchema;
using c10::OperatorHandle;
using c10::TypeKind;

c10::TypePtr without_optional(const Argument& arg) {
  c10::TypePtr type = arg.real_type();
  while (type->kind() == TypeKind::OptionalType) {
    type = type->castRaw<c10::OptionalType>()->getElementType();
  }
  return type;
}

bool is_number(const c10::Type& type) {
  return type.kind() == TypeKind::NumberType || type.kind() == TypeKind::FloatType;
}

ArgKind kind_of(const Argument& arg) {
  c10::TypePtr type = without_optional(arg);
  switch (type->kind()) {
    case TypeKind::TensorType:
      return ArgKind::kTensor;
    case TypeKind::NumberType:
    case TypeKind::FloatType:
      return ArgKind::kScalar;
    case TypeKind::GeneratorType:
      return ArgKind::kGenerator;
    case TypeKind::DeviceObjType:
      return ArgKind::kDevice;
    case TypeKind::ListType: {
      c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == TypeKind::OptionalType) {
        element = element->castRaw<c10::OptionalType>()->getElementType();
      }
      if (element->kind() == TypeKind::TensorType) return ArgKind::kTensorList;
      return is_number(*element) ? ArgKind::kScalarList : ArgKind::kStatic;
    }
    default:
      return ArgKind::kStatic;
  }
}

bool is_tensor_kind(ArgKind kind) {
  return kind == ArgKind::kTensor || kind == ArgKind::kTensorList;
}

bool is_dtype(const Argument& arg) {
  return without_optional(arg)->kind() == TypeKind::ScalarTypeType;
}

bool written(const Argument& arg) { return arg.alias_info() && arg.alias_info()->isWrite(); }

using NamesByName = std::unordered_map<std::string, std::vector<c10::OperatorName>>;

NamesByName all_names() {
  NamesByName result;
  for (auto& op : c10::Dispatcher::singleton().getAllOpNames()) result[op.name].push_back(op);
  return result;
}

// All overloads in the dispatcher, by name without overload.
std::vector<OperatorHandle> overloads(const std::string& name) {
  static const auto* of_pytorch = new NamesByName(all_names());
  // Users define theirs at any time.
  NamesByName now = name.starts_with("aten::") ? NamesByName() : all_names();
  const NamesByName& names = name.starts_with("aten::") ? *of_pytorch : now;
  std::vector<OperatorHandle> result;
  auto found = names.find(name);
  if (found == names.end()) return result;
  for (const c10::OperatorName& op : found->second) {
    if (auto handle = c10::Dispatcher::singleton().findSchema(op)) result.push_back(*handle);
  }
  return result;
}

bool is_tensor_option(const std::string& name) {
  return name == "dtype" || name == "layout" || name == "device" || name == "pin_memory";
}

// Whether `functional` computes what `op` writes: it writes nothing, every argument of it is one of
// op's by name (tensor options may be new: they come from `out`), and it takes all that op reads.
bool is_counterpart(const FunctionSchema& op, const FunctionSchema& functional, bool is_out) {
  if (functional.is_mutable()) return false;
  size_t shared = 0;
  for (const Argument& arg : functional.arguments()) {
    auto position = op.argumentIndexWithName(arg.name());
    if (position) {
      const Argument& own = op.arguments()[*position];
      if (kind_of(own) != kind_of(arg)) return false;
      ++shared;
    } else if (!(is_out && is_tensor_option(arg.name())) && !arg.default_value()) {
      return false;
    }
  }
  size_t needed = 0, outputs = 0, fresh = 0;
  for (const Argument& arg : op.arguments()) {
    if (written(arg)) ++outputs;
    if (!(is_out && written(arg) && arg.kwarg_only())) ++needed;
  }
  for (const Argument& ret : op.returns()) {
    if (!ret.alias_info()) ++fresh;
  }
  return shared == needed && functional.returns().size() == outputs + fresh;
}

std::vector<std::string> functional_names(std::string name) {
  std::string base = name;
  size_t colon = base.rfind(':') + 1;
  if (base.compare(colon, 3, "__i") == 0) base.erase(colon + 2, 1);  // __iand__ is __and__ in place
  if (base.back() == '_' && base[base.size() - 2] != '_') base.pop_back();
  std::vector<std::string> names{base, base + "_functional"};
  if (base != name) names.push_back(name + "functional");
  return names;
}

std::optional<OperatorHandle> find_functional(const FunctionSchema& op) {
  bool is_out = false;
  for (const Argument& arg : op.arguments()) is_out |= written(arg) && arg.kwarg_only();
  std::optional<OperatorHandle> found;
  for (const std::string& name : functional_names(op.name())) {
    for (const OperatorHandle& candidate : overloads(name)) {
      if (!is_counterpart(op, candidate.schema(), is_out)) continue;
      if (candidate.schema().overload_name() == op.overload_name()) return candidate;
      if (!found) found = candidate;
    }
    if (found) break;
  }
  return found;
}

// Reductions that compute in the dtype of out=, as if it were their argument.
bool computes_in_dtype_of_out(std::string_view name) {
  return is_among(name, {"aten::sum", "aten::nansum", "aten::prod", "aten::mean", "aten::cumsum",
                         "aten::cumprod"});
}

void bind_functional(OpInfo& info, const FunctionSchema& op) {
  const FunctionSchema& functional = info.functional.schema();
  int out = -1;
  for (size_t i = 0; i < info.args.size(); ++i) {
    bool taken = functional.argumentIndexWithName(op.arguments()[i].name()).has_value();
    info.args[i].operand = taken;
    if (info.args[i].written && out < 0) out = static_cast<int>(i);
  }
  for (const Argument& arg : functional.arguments()) {
    ArgSource source{.kind = ArgSource::kDefault, .is_dtype = is_dtype(arg)};
    if (auto position = op.argumentIndexWithName(arg.name())) {
      source.kind = ArgSource::kArgument;
      source.position = *position;
      if (source.is_dtype && computes_in_dtype_of_out(op.name())) source.out = out;
    } else if (arg.name() == "dtype") {
      source.kind = ArgSource::kDtypeOfOut;
      source.position = out;
    } else if (arg.name() == "device") {
      source.kind = ArgSource::kDeviceOfOut;
      source.position = out;
    } else if (arg.default_value()) {
      source.value = *arg.default_value();
    }
    info.functional_args.push_back(std::move(source));
  }
  // Scan reads operands and slots in the operator's order, the lowering in the counterpart's.
  int last = -1;
  for (const ArgSource& source : info.functional_args) {
    if (source.kind != ArgSource::kArgument) continue;
    if (source.position < last) info.recordable = false;
    last = source.position;
  }
}

// Operators that write one value everywhere, or where a mask says so. And one that PyTorch lets
// write what elements that share memory have in common.
bool fills(const std::string& functional_name) {
  return is_among(functional_name,
                  {"aten::fill.Scalar", "aten::fill.Tensor", "aten::zero",
                   "aten::masked_fill.Scalar", "aten::masked_fill.Tensor", "aten::threshold"});
}

// Operators that use only the shape and dtype of their first argument: its content does not matter.
bool ignores_self(const std::string& functional_name) {
  return is_among(functional_name,
                  {"aten::fill.Scalar", "aten::fill.Tensor", "aten::zero", "aten::uniform",
                   "aten::normal_functional", "aten::log_normal", "aten::exponential",
                   "aten::cauchy", "aten::geometric", "aten::bernoulli.p", "aten::bernoulli.Tensor",
                   "aten::random", "aten::random.from", "aten::random.to"});
}

// Ranges. All other factories of PyTorch's have their sizes from integers.
bool is_range(const std::string& functional_name) {
  return functional_name.starts_with("aten::arange") || functional_name == "aten::range" ||
         functional_name == "aten::range.step";
}

// Integers whose values decide neither shapes nor what the rule emits. (The rule of random.from
// depends on whether they fit in 32 bits, which is in a call's key.)
bool is_index(const std::string& functional_name, const std::string& argument) {
  if (functional_name == "aten::roll") return argument == "shifts";
  if (is_among(functional_name, {"aten::tril", "aten::triu"})) return argument == "diagonal";
  if (functional_name == "aten::random.to") return argument == "to";
  return functional_name == "aten::random.from" && is_among(argument, {"from", "to"});
}

// Operators for which it makes no difference whether their numbers are constants. (A power is
// better computed if its exponent is known.)
bool scales(const std::string& functional_name) {
  constexpr std::string_view aten = "aten::", foreach = "_foreach_";
  if (!functional_name.starts_with(aten)) return false;
  std::string name = functional_name.substr(aten.size());
  if (name.starts_with("_fused_")) return true;
  if (name.starts_with(foreach)) name.erase(0, foreach.size());
  return is_among(name.substr(0, name.find('.')),
                  {"add", "sub", "rsub", "mul", "div", "lerp", "addcmul", "addcdiv", "fill"});
}

// PyTorch tags its attention for CPUs as if it had dropout.
bool draws(const OperatorHandle& functional, const std::string& name) {
  return functional.hasTag(at::Tag::nondeterministic_seeded) &&
         name != "aten::_scaled_dot_product_flash_attention_for_cpu";
}

std::unique_ptr<OpInfo> make_info(const OperatorHandle& op) {
  const FunctionSchema& schema = op.schema();
  auto info = std::make_unique<OpInfo>(op);
  info->name = qualified_name(op.operator_name());
  for (const Argument& arg : schema.arguments()) {
    info->args.push_back(
        {kind_of(arg), written(arg), true, is_dtype(arg), arg.default_value().has_value()});
    info->writes |= written(arg);
    info->writes_list |= written(arg) && info->name.starts_with("aten::_foreach_");
  }
  for (const Argument& ret : schema.returns()) {
    int aliased = -1;
    for (size_t i = 0; ret.alias_info() && i < schema.arguments().size(); ++i) {
      const Argument& arg = schema.arguments()[i];
      if (written(arg) && arg.alias_info()->beforeSets() == ret.alias_info()->beforeSets()) {
        aliased = static_cast<int>(i);
      }
    }
    info->returns.push_back(aliased);
  }
  if (info->writes) {
    auto functional = find_functional(schema);
    info->recordable = functional.has_value();
    if (functional) info->functional = *functional;
  }
  info->functional_name = qualified_name(info->functional.operator_name());
  bind_functional(*info, schema);
  if (ignores_self(info->functional_name)) info->args[0].operand = false;
  for (const ArgInfo& arg : info->args) info->reads_written |= arg.written && arg.operand;
  info->may_overlap = fills(info->functional_name);
  info->random = draws(info->functional, info->functional_name);
  info->collective = info->functional.schema().getNamespace() == "lazyxla_c10d";
  info->spreads = info->functional.schema().getNamespace() != "aten";
  info->factory = true;
  for (const Argument& arg : info->functional.schema().arguments()) {
    if (is_tensor_kind(kind_of(arg))) info->factory = false;
  }
  info->scales = scales(info->functional_name);
  info->sized_by_numbers = is_range(info->functional_name);
  info->numbers_are_static = info->factory && !info->name.starts_with("aten::");
  for (size_t i = 0; i < info->args.size(); ++i) {
    const Argument& arg = schema.arguments()[i];
    if (!is_index(info->functional_name, arg.name())) continue;
    const bool is_list = without_optional(arg)->kind() == TypeKind::ListType;
    info->args[i].kind = is_list ? ArgKind::kIndexList : ArgKind::kIndex;
  }
  find_checks(*info);
  return info;
}

// All infos that were made.
using Infos = std::unordered_map<c10::OperatorName, std::unique_ptr<OpInfo>>;

auto& all_infos = *new Guarded<Infos>();

}  // namespace

std::string qualified_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

OpInfo& OpInfo::of(const OperatorHandle& op) {
  {
    const auto infos = all_infos.hold();
    auto found = infos->find(op.operator_name());
    if (found != infos->end()) return *found->second;
  }
  auto info = make_info(op);
  return *all_infos.hold()->try_emplace(op.operator_name(), std::move(info)).first->second;
}

void OpInfo::forget_lowering_kind(const std::string& name) {
  static std::atomic<uint64_t> next_key{1};  // odd: no address
  const auto infos = all_infos.hold();
  const std::string ns = name.substr(0, name.find("::") + 2);
  for (auto it = infos->begin(); it != infos->end();) {
    OpInfo& info = *it->second;
    if (info.functional_name == name) {
      info.memo_key = next_key.fetch_add(2);
      info.lowering_kind = LoweringKind::kUnknown;
    }
    // A user's operator that writes may have a functional counterpart by now.
    bool outdated = ns != "aten::" && !info.recordable && info.name.starts_with(ns);
    if (outdated) it->second.release();  // another thread may be reading it
    it = outdated ? infos->erase(it) : std::next(it);
  }
}

}  // namespace lazyxla::dispatch
