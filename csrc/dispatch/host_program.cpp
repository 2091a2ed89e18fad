#include "dispatch/host_program.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <vector>

#include "common/warnings.h"
#include "dispatch/host_arguments.h"
#include "dispatch/op_info.h"
#include "dispatch/plain_call.h"
#include "program/host_program.h"
#include "record/settings.h"

namespace lazyxla::dispatch {
namespace {

using c10::IValue;
using c10::TypeKind;
using ir::Geometry;

// ---- which operators ----

bool has_floats(const std::vector<ir::TensorType>& types) {
  return std::any_of(types.begin(), types.end(), [](const ir::TensorType& type) {
    return c10::isFloatingType(type.dtype) || c10::isComplexType(type.dtype);
  });
}

bool is_defined_otherwise(const ir::Node& node) {
  const ir::OpSpec& spec = *node.spec();
  if (has_floats(spec.outputs)) return false;
  if (spec.name == "lazyxla::cast" || spec.name == "aten::_to_copy") {
    const c10::ScalarType from = node.operands()[0].type().dtype;
    return c10::isFloatingType(from) && spec.outputs[0].dtype != c10::ScalarType::Bool;
  }
  return is_among(std::string_view(spec.name).substr(0, spec.name.find('.')),
                  {"aten::div", "aten::floor_divide", "aten::remainder", "aten::fmod", "aten::gcd",
                   "aten::lcm", "aten::pow", "aten::float_power"});
}

bool may_call(const c10::OperatorHandle& op, const ir::Node& node) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.is_mutable()) return false;
  const bool takes_integers =
      std::any_of(node.operands().begin(), node.operands().end(), [](const ir::Value& operand) {
        return c10::isIntegralType(operand.type().dtype, /*includeBool=*/false);
      });
  // Tensors whose values must be in a range, which not all kernels check. (They do check index
  // arguments.)
  return !takes_integers ||
         std::none_of(schema.arguments().begin(), schema.arguments().end(), [](const auto& arg) {
           return arg.type()->isSubtypeOf(*c10::OptionalType::ofTensor()) &&
                  is_among(arg.name(), {"offsets", "repeats"});
         });
}

// ---- one call ----

// The content of a storage in memory order, as one dimension. A copy, if it is to be written.
at::Tensor memory_of(const at::Tensor& x, const Geometry& base, bool is_written) {
  const bool is_flat =
      !is_written && base.strides == Geometry::contiguous(base.dtype, base.sizes).strides;
  if (is_flat) return x.contiguous().view({-1});
  at::Tensor memory = at::empty({base.numel()}, x.options());
  memory.as_strided(base.sizes, base.strides).copy_(x);
  return memory;
}

using Own = at::Tensor (*)(const ir::OpSpec&, Arguments&);

// The recorder's internal operators.
Own own_kernel(const std::string& name) {
  if (name == "lazyxla::view") {
    return [](const ir::OpSpec& spec, Arguments& args) {
      const at::Tensor& x = args.operand();
      return args.through(memory_of(x, spec.args[1].geometry, /*is_written=*/false));
    };
  }
  if (name == "lazyxla::view_scatter") {
    return [](const ir::OpSpec& spec, Arguments& args) {
      const at::Tensor &x = args.operand(), &update = args.operand();
      const Geometry& base = spec.args[2].geometry;
      const at::Tensor memory = memory_of(x, base, /*is_written=*/true);
      args.through(memory).copy_(update);
      return memory.as_strided(base.sizes, base.strides);
    };
  }
  if (name == "lazyxla::cast") {
    return [](const ir::OpSpec& spec, Arguments& args) {
      return args.operand().to(spec.outputs[0].dtype);
    };
  }
  if (name == "lazyxla::constant") {
    return [](const ir::OpSpec& spec, Arguments& args) {
      const at::Tensor number = args.slot(TypeKind::TensorType).toTensor();
      return number.to(spec.outputs[0].dtype).expand(spec.outputs[0].dims);
    };
  }
  if (name == "lazyxla::undefined") {
    return [](const ir::OpSpec& spec, Arguments&) {
      return at::zeros(spec.outputs[0].dims, spec.outputs[0].dtype);
    };
  }
  return nullptr;
}

// A node, without the graph that it is part of.
struct Call {
  std::unique_ptr<const ir::OpSpec> spec;
  std::vector<uint32_t> operands;
  Own own = nullptr;
  std::optional<c10::OperatorHandle> op;
  size_t first_slot = 0;
  bool is_contiguous_only = false;    // whether the kernel takes no other tensors
  std::vector<uint32_t> last_uses{};  // operands that no later call takes
};

Call make_call(const program::Graph& graph, size_t number) {
  const ir::Node& node = *graph.nodes[number].get();
  Call call{.spec = std::make_unique<ir::OpSpec>(*node.spec())};
  for (size_t i = 0; i < node.operands().size(); ++i) {
    call.operands.push_back(graph.operand(number, i));
  }
  return call;
}

// The internal operator's kernel, or PyTorch's operator; neither if the node is to be compiled.
std::pair<Own, std::optional<c10::OperatorHandle>> kernel_of(const ir::Node& node) {
  const ir::OpSpec& spec = *node.spec();
  const bool as_now = spec.settings == 0 || spec.settings == record::record_settings();
  if (!as_now || is_defined_otherwise(node)) return {};
  if (Own own = own_kernel(spec.name)) return {own, std::nullopt};
  if (!spec.name.starts_with("aten::") && !spec.name.starts_with("lazyxla::")) return {};
  const auto op = find_operator(spec.name);
  if (!op || OpInfo::of(*op).has_users_rule || !may_call(*op, node)) return {};
  if (auto ours = find_own_kernel(spec.name)) return {nullptr, ours};
  const bool has_kernel = op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  if (!has_kernel || spec.random || spec.name.starts_with("lazyxla::")) return {};
  return {nullptr, op};
}

bool computes(const ir::Node& node) {
  const auto [own, op] = kernel_of(node);
  return own || op;
}

// ---- the program ----

// Of the same strides.
at::Tensor zeros_as(const at::Tensor& x) {
  int64_t extent = x.numel() > 0 ? 1 : 0;
  for (int64_t i = 0; i < x.dim() && extent > 0; ++i) extent += (x.size(i) - 1) * x.stride(i);
  return at::zeros({extent}, x.options()).as_strided(x.sizes(), x.strides());
}

at::Tensor tensor_on(const void* memory, const ir::TensorType& type) {
  return at::from_blob(const_cast<void*>(memory), type.dims, at::TensorOptions(type.dtype));
}

class CpuProgram {
 public:
  // The calls of all nodes.
  CpuProgram(const program::Graph& graph, std::vector<Call> calls)
      : calls_(std::move(calls)), outputs_(graph.outputs) {
    for (const ir::NodePtr& leaf : graph.leaves) inputs_.push_back(leaf->output_type(0));
    std::vector<ir::TensorType> types = inputs_;
    for (const Call& call : calls_) {
      types.insert(types.end(), call.spec->outputs.begin(), call.spec->outputs.end());
    }
    for (uint32_t output : outputs_) results_.push_back(types[output]);
    find_last_uses(types.size());
  }

  const std::vector<ir::TensorType>& results() const { return results_; }

  // Whether the kernels accept zeros (not what others make of them, which may be no index: `i - 5`)
  // and return what was inferred. Finds out which of them take contiguous tensors only.
  bool works(c10::ArrayRef<ir::ScalarValue> slots) {
    PlainScope plain;
    KeptWarnings silence;  // what kernels say of zeros is not about the user's data
    std::vector<at::Tensor> values;
    for (const ir::TensorType& type : inputs_) values.push_back(at::zeros(type.dims, type.dtype));
    size_t tried = values.size();
    try {
      for (Call& call : calls_) {
        try {
          compute(call, values, slots);
        } catch (const std::exception&) {
          call.is_contiguous_only = true;
          compute(call, values, slots);
        }
        free_last_used(call, values);
        for (; tried < values.size(); ++tried) values[tried] = zeros_as(values[tried]);
      }
    } catch (const std::exception&) {
      return false;  // the compiler reports what is wrong, if anything
    }
    for (size_t i = 0; i < outputs_.size(); ++i) {
      const at::Tensor& found = values.at(outputs_[i]);
      if (found.scalar_type() != results_[i].dtype) return false;
      if (found.sizes() != c10::IntArrayRef(results_[i].dims)) return false;
    }
    return true;
  }

  std::vector<program::OwnedMemory> run(c10::ArrayRef<const void*> inputs,
                                        c10::ArrayRef<ir::ScalarValue> slots) const {
    PlainScope plain;
    KeptWarnings silence;  // a call warns when it is recorded (checks.h), whatever runs it
    std::vector<at::Tensor> values;
    for (size_t i = 0; i < inputs.size(); ++i) values.push_back(tensor_on(inputs[i], inputs_[i]));
    for (const Call& call : calls_) {
      compute(call, values, slots);
      free_last_used(call, values);
    }
    std::vector<program::OwnedMemory> results;
    c10::SmallVector<const void*, 8> taken(inputs.begin(), inputs.end());
    for (uint32_t output : outputs_) {
      at::Tensor value = values.at(output);
      const at::Storage& memory = value.storage();
      const bool is_whole = value.is_contiguous() && memory.nbytes() == value.nbytes();
      const bool is_taken = std::find(taken.begin(), taken.end(), memory.data()) != taken.end();
      if (!is_whole || is_taken) value = value.clone(at::MemoryFormat::Contiguous);
      taken.push_back(value.const_data_ptr());
      void* data = value.mutable_data_ptr();
      results.push_back({data, std::make_shared<at::Tensor>(std::move(value))});
    }
    return results;
  }

 private:
  // What no later call takes, and is no result, is freed.
  static void free_last_used(const Call& call, std::vector<at::Tensor>& values) {
    for (uint32_t value : call.last_uses) values[value].reset();
  }
  void find_last_uses(size_t values) {
    std::vector<bool> is_used(values, false);
    for (uint32_t output : outputs_) is_used[output] = true;
    for (size_t i = calls_.size(); i-- > 0;) {
      for (uint32_t operand : calls_[i].operands) {
        if (is_used[operand]) continue;
        is_used[operand] = true;
        calls_[i].last_uses.push_back(operand);
      }
    }
  }

  // Appends the call's results to the values.
  static void compute(const Call& call, std::vector<at::Tensor>& values,
                      c10::ArrayRef<ir::ScalarValue> slots) {
    c10::SmallVector<at::Tensor, 4> operands;
    for (uint32_t operand : call.operands) {
      const at::Tensor& value = values.at(operand);
      operands.push_back(call.is_contiguous_only ? value.contiguous() : value);
    }
    Arguments args(*call.spec, operands, slots.slice(call.first_slot, call.spec->slots.size()));
    if (call.own) {
      values.push_back(call.own(*call.spec, args));
      return;
    }
    torch::jit::Stack stack;
    const auto& arguments = call.op->schema().arguments();
    for (size_t i = 0; i < call.spec->args.size(); ++i) {
      stack.push_back(args.read(call.spec->args[i], arguments[i].real_type()));
    }
    while (stack.size() < arguments.size()) {  // seed and ordinal
      stack.push_back(args.slot(TypeKind::IntType).toScalar().to<int64_t>());
    }
    call.op->callBoxed(&stack);
    const size_t before = values.size();
    for (const IValue& value : stack) flatten(value, values);
    // An undefined tensor, a gradient that nobody asked for, is no value of the graph.
    values.erase(std::remove_if(values.begin() + static_cast<std::ptrdiff_t>(before), values.end(),
                                [](const at::Tensor& x) { return !x.defined(); }),
                 values.end());
    TORCH_CHECK(values.size() == before + call.spec->outputs.size(), "other results than inferred");
    // A kernel may return a conjugate as a bit of the tensor, which its memory does not show.
    for (size_t i = before; i < values.size(); ++i) {
      if (values[i].is_conj() || values[i].is_neg()) {
        values[i] = values[i].resolve_conj().resolve_neg();
      }
    }
  }

  std::vector<Call> calls_;
  std::vector<uint32_t> outputs_;
  std::vector<ir::TensorType> inputs_, results_;
};

program::HostProgram run_by(std::shared_ptr<const CpuProgram> program) {
  auto compute = [program](c10::ArrayRef<const void*> inputs,
                           c10::ArrayRef<ir::ScalarValue> slots) {
    return program->run(inputs, slots);
  };
  return {std::move(compute), program->results()};
}

std::optional<program::HostProgram> make(const program::Graph& graph) {
  std::vector<Call> calls;
  size_t slots = 0;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const auto [own, op] = kernel_of(*graph.nodes[i].get());
    if (!own && !op) return std::nullopt;
    Call call = make_call(graph, i);
    call.own = own;
    call.op = op;
    call.first_slot = std::exchange(slots, slots + call.spec->slots.size());
    calls.push_back(std::move(call));
  }
  auto program = std::make_shared<CpuProgram>(graph, std::move(calls));
  if (!program->works(graph.slots)) return std::nullopt;
  return run_by(std::move(program));
}

}  // namespace

program::HostProgram host_program_of_call(const program::Graph& graph) {
  std::vector<Call> calls;
  calls.push_back(make_call(graph, 0));
  const std::string& name = calls[0].spec->name;
  const auto ours = find_own_kernel(name);
  calls[0].op = ours ? ours : find_operator(name);
  return run_by(std::make_shared<CpuProgram>(graph, std::move(calls)));
}

void install_host_programs() { program::set_host_program_maker({&make, &computes}); }

}  // namespace lazyxla::dispatch
