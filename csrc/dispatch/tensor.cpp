#include "dispatch/tensor.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>

#include <array>

#include "common/counters.h"
#include "common/hash.h"
#include "dispatch/shape_memo.h"
#include "ir/sharding.h"
#include "program/buffer.h"
#include "record/capture.h"
#include "record/recording.h"

namespace lazyxla::dispatch {
namespace {

using ir::Arg;
using ir::Geometry;
using ir::Value;

// The keys of internal nodes' specs. The numbers only need to differ from each other.
enum Internal : uint64_t {
  kView = 1,
  kViewScatter,
  kCast,
  kUndefined,
  kConjugate,
  kNegative,
  kConstrain
};

void append(c10::SmallVectorImpl<uint64_t>& key, const Geometry& g) {
  key.push_back((static_cast<uint64_t>(g.dtype) << 8) | g.sizes.size());
  key.append(g.sizes.begin(), g.sizes.end());
  key.append(g.strides.begin(), g.strides.end());
  key.push_back(g.offset);
}

Arg operand() { return Arg{.kind = Arg::Kind::kOperand}; }

Arg geometry_arg(const Geometry& g) { return Arg{.kind = Arg::Kind::kGeometry, .geometry = g}; }

// A node of an operator of ours. Its spec is in the shape memo beside those of ATen's: OpInfo ids
// are large, so the first word distinguishes them.
template <typename MakeArgs>
Value internal(Internal what, const char* name, c10::SmallVectorImpl<uint64_t>& key,
               const MakeArgs& make_args, ir::TensorType output, c10::ArrayRef<Value> operands,
               c10::ArrayRef<ir::ScalarValue> indices = {},
               const ir::Sharding* sharding = nullptr) {
  key[0] = what;
  MemoKey memo_key{key.data(), key.size(), hash_words(key.data(), key.size())};
  RecipeRef recipe = ShapeMemo::get().find(memo_key);
  if (!recipe) {
    auto fresh = std::make_shared<Recipe>();
    fresh->spec.name = name;
    fresh->spec.args = make_args();
    fresh->spec.slots.assign(indices.size(), {c10::ScalarType::Long, true, ir::SlotKind::kIndex});
    fresh->spec.outputs = {std::move(output)};
    fresh->spec.sharding = sharding;
    recipe = ShapeMemo::get().insert(memo_key, std::move(fresh));
  }
  ++Counters::get().nodes_recorded;
  const ir::OpSpec* spec = &recipe->spec;
  return {ir::Node::make(spec, operands, indices, std::move(recipe)), 0};
}

// A node that reads or writes a base through a view. Where the view begins is no part of its spec.
Value through_view(Internal what, const char* name, const Geometry& from, Geometry to,
                   const Geometry& yields, c10::ArrayRef<Value> operands) {
  const ir::Begin begin = ir::begin_of(from, to);
  to.offset = 0;
  c10::SmallVector<uint64_t, 32> key(1);
  append(key, from);
  append(key, to);
  key.push_back(begin.weights.size());
  key.append(begin.weights.begin(), begin.weights.end());
  c10::SmallVector<ir::ScalarValue, 5> starts;
  for (int64_t start : begin.starts) starts.push_back({.i = start});
  auto make_args = [&] {
    std::vector<Arg> args(operands.size(), operand());
    args.push_back(geometry_arg(from));
    args.push_back(geometry_arg(to));
    if (begin.weights.empty()) return args;
    args.push_back({.kind = Arg::Kind::kConstant, .constant = c10::IntArrayRef(begin.weights)});
    args.push_back({.kind = Arg::Kind::kList,
                    .list = std::vector<Arg>(starts.size(), {.kind = Arg::Kind::kSlot})});
    return args;
  };
  return internal(what, name, key, make_args, {yields.dtype, yields.sizes}, operands, starts);
}

Value view(Value base, const Geometry& from, const Geometry& to) {
  std::array<Value, 1> operands{std::move(base)};
  return through_view(kView, "lazyxla::view", from, to, to, operands);
}

Value view_scatter(Value base, Value update, const Geometry& from, const Geometry& to) {
  std::array<Value, 2> operands{std::move(base), std::move(update)};
  return through_view(kViewScatter, "lazyxla::view_scatter", from, to, from, operands);
}

// The content of memory that was never written.
Value undefined(const Geometry& base) {
  c10::SmallVector<uint64_t, 16> key(1);
  append(key, base);
  return internal(kUndefined, "lazyxla::undefined", key, [] { return std::vector<Arg>{}; },
                  {base.dtype, base.sizes}, {});
}

// The bytes of its storage that a tensor needs must exist: the storage may have been shrunk.
void check_bounds(const Geometry& g, const ir::Storage& storage) {
  size_t needed =
      at::detail::computeStorageNbytes(g.sizes, g.strides, c10::elementSize(g.dtype), g.offset);
  TORCH_CHECK(needed <= storage.nbytes(), "setStorage: sizes ", g.sizes, ", strides ", g.strides,
              ", storage offset ", g.offset, ", and itemsize ", c10::elementSize(g.dtype),
              " requiring a storage size of ", needed, " are out of bounds for storage of size ",
              storage.nbytes());
}

// A tensor that stands for its conjugate or negative has a bit set. PyTorch resolves it before most
// operators, but some (matmuls) take such tensors as they are.
bool has_math_bits(const c10::TensorImpl& tensor) {
  return tensor.key_set().has_any(
      c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}));
}

// Converts the content of memory to the tensor's value, or back: both are the same operators.
Value apply_math_bits(const c10::TensorImpl& tensor, Value value) {
  auto unary = [](Internal what, const char* name, Value x) {
    c10::SmallVector<uint64_t, 16> key(2);
    const ir::TensorType type = x.type();
    key[1] = static_cast<uint64_t>(type.dtype);
    key.append(type.dims.begin(), type.dims.end());
    std::array<Value, 1> operands{std::move(x)};
    return internal(what, name, key, [] { return std::vector<Arg>{operand()}; }, type, operands);
  };
  if (tensor.key_set().has(c10::DispatchKey::Conjugate)) {
    value = unary(kConjugate, "aten::conj_physical", std::move(value));
  }
  if (tensor.key_set().has(c10::DispatchKey::Negative)) {
    value = unary(kNegative, "aten::neg", std::move(value));
  }
  return value;
}

Value content(ir::Storage& storage) {
  return storage.value() ? storage.value() : undefined(storage.base());
}

// Whether reading through `tensor` is reading the storage's value unchanged.
bool is_base(const c10::TensorImpl& tensor, const Geometry& base) {
  return tensor.storage_offset() == 0 && c10::typeMetaToScalarType(tensor.dtype()) == base.dtype &&
         ir::same_layout(tensor.sizes(), tensor.strides(), base.sizes, base.strides);
}

// The content of a storage that is to be spread; a copy if the data has another sharding.
Value spread(const ir::Storage& storage, Value value) {
  const ir::Sharding* sharding = storage.sharding();
  if (!sharding || !value.node->is_leaf()) return value;
  const program::DeviceBuffer& buffer = program::buffer_of(*value.node.get());
  if (buffer.sharding() == sharding) return value;
  return constrain(std::move(value), *sharding);
}

// Whether a geometry is of the parts of complex numbers. Optimizers update complex parameters so;
// if the parameter became real by that, the next step would be another program.
bool is_real_of(const Geometry& geometry, const Geometry& base) {
  return c10::isComplexType(base.dtype) && geometry.dtype == c10::toRealValueType(base.dtype);
}

// Whether the tensor is its storage's elements in the order of the memory, in any shape.
bool is_row_major(const c10::TensorImpl& tensor, const ir::Storage& storage) {
  return tensor.is_contiguous() && tensor.storage_offset() == 0 && !has_math_bits(tensor) &&
         static_cast<size_t>(tensor.numel()) * tensor.itemsize() == storage.nbytes();
}

}  // namespace

ir::Storage& storage_of(const c10::TensorImpl& tensor) {
  c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  TORCH_CHECK(storage, "lazyxla: a tensor without memory of its own, as within torch.func's ",
              "transforms, cannot be used here");
  return ir::Storage::of(*storage);
}

bool covers(const Geometry& g, const ir::Storage& storage) {
  return g.offset == 0 && static_cast<size_t>(g.nbytes()) == storage.nbytes() &&
         ir::is_dense(g.sizes, g.strides);
}

Geometry geometry_of(const c10::TensorImpl& tensor) {
  auto sizes = tensor.sizes();
  auto strides = tensor.strides();
  return {c10::typeMetaToScalarType(tensor.dtype()),
          {sizes.begin(), sizes.end()},
          {strides.begin(), strides.end()},
          tensor.storage_offset()};
}

at::TensorBase tensor_of(const c10::TensorImpl& tensor) {
  return at::TensorBase(c10::intrusive_ptr<c10::TensorImpl>::unsafe_reclaim_from_nonowning(
      const_cast<c10::TensorImpl*>(&tensor)));
}

bool is_whole(const c10::TensorImpl& tensor) {
  return is_base(tensor, storage_of(tensor).base()) && !has_math_bits(tensor);
}

Value read(const c10::TensorImpl& tensor, ir::PendingSet& pending) {
  ir::Storage& storage = storage_of(tensor);
  if (!is_base(tensor, storage.base())) {
    Value value = read(storage, geometry_of(tensor), pending);
    return has_math_bits(tensor) ? apply_math_bits(tensor, std::move(value)) : value;
  }
  record::take_over_pending(storage, pending);
  Value value = content(storage);
  return has_math_bits(tensor) ? apply_math_bits(tensor, std::move(value)) : value;
}

Value read(ir::Storage& storage, const Geometry& geometry, ir::PendingSet& pending) {
  check_bounds(geometry, storage);
  record::take_over_pending(storage, pending);
  if (!storage.value() && covers(geometry, storage) && !storage.sharding()) {
    storage.set_base(geometry);
  }
  if (const Value* known = storage.find_view(geometry)) return *known;
  const Geometry& base = storage.base();
  Value value = content(storage);
  if (geometry.offset == 0 && geometry.dtype == base.dtype &&
      ir::same_layout(geometry.sizes, geometry.strides, base.sizes, base.strides)) {
    return value;
  }
  return view(std::move(value), base, geometry);
}

void write(const c10::TensorImpl& tensor, Value value, ir::PendingSet& pending,
           ir::Garbage& garbage) {
  ir::Storage& storage = storage_of(tensor);
  if (has_math_bits(tensor)) value = apply_math_bits(tensor, std::move(value));
  if (is_base(tensor, storage.base())) {
    record::Capture::before_write(storage);
    storage.set_value(spread(storage, std::move(value)), pending, garbage);
    return;
  }
  write(storage, geometry_of(tensor), std::move(value), pending, garbage);
}

void write(ir::Storage& storage, const Geometry& geometry, Value value, ir::PendingSet& pending,
           ir::Garbage& garbage) {
  record::Capture::before_write(storage);
  if (covers(geometry, storage) && !storage.sharding()) {  // which is for its base
    if (is_real_of(geometry, storage.base()) && !storage.is_new()) {
      storage.set_value(view(std::move(value), geometry, storage.base()), pending, garbage);
    } else {
      storage.set_value(std::move(value), geometry, pending, garbage);
    }
    return;
  }
  if (geometry.numel() == 0) return;
  check_bounds(geometry, storage);
  record::take_over_pending(storage, pending);
  Value next = view_scatter(content(storage), std::move(value), storage.base(), geometry);
  storage.set_value(std::move(next), pending, garbage);
}

bool take_over(const c10::TensorImpl& fresh, const c10::TensorImpl& source,
               ir::PendingSet& pending) {
  ir::Storage& from = storage_of(source);
  if (!from.value() || !is_row_major(source, from)) return false;
  record::take_over_pending(from, pending);
  ir::Garbage none;
  storage_of(fresh).set_value(from.value(), from.base(), pending, none);
  return true;
}

Value reshape(Value value, c10::IntArrayRef sizes) {
  const ir::TensorType from = value.type();
  return view(std::move(value), Geometry::contiguous(from.dtype, from.dims),
              Geometry::contiguous(from.dtype, sizes));
}

Value cast(Value value, c10::ScalarType dtype) {
  if (value.type().dtype == dtype) return value;
  c10::SmallVector<uint64_t, 16> key(1);
  const ir::TensorType& from = value.type();
  key.push_back((static_cast<uint64_t>(from.dtype) << 16) | (static_cast<uint64_t>(dtype) << 8));
  key.append(from.dims.begin(), from.dims.end());
  ir::TensorType to{dtype, from.dims};
  std::array<Value, 1> operands{std::move(value)};
  return internal(
      kCast, "lazyxla::cast", key,
      [&] {
        return std::vector<Arg>{
            operand(), Arg{.kind = Arg::Kind::kDtype, .constant = static_cast<int64_t>(dtype)}};
      },
      to, operands);
}

Value constrain(Value value, const ir::Sharding& sharding) {
  const ir::TensorType type = value.type();
  c10::SmallVector<uint64_t, 16> key(1);
  key.push_back(sharding.id());
  key.push_back(static_cast<uint64_t>(type.dtype));
  key.append(type.dims.begin(), type.dims.end());
  std::array<Value, 1> operands{std::move(value)};
  return internal(
      kConstrain, "lazyxla::constrain", key,
      [&] {
        return std::vector<Arg>{operand(),
                                Arg{.kind = Arg::Kind::kConstant, .constant = sharding.text()}};
      },
      type, operands, {}, &sharding);
}

at::TensorBase make_tensor(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                           c10::DeviceIndex device) {
  size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  Geometry geometry{dtype, {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, 0};
  if (static_cast<size_t>(geometry.nbytes()) == nbytes && ir::is_dense(sizes, strides)) {
    return make_tensor(geometry, nbytes, device);
  }
  auto elements = static_cast<int64_t>(nbytes / c10::elementSize(dtype));
  auto tensor = make_tensor(Geometry::contiguous(dtype, {elements}), nbytes, device);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::TensorBase make_tensor(const Geometry& dense, size_t nbytes, c10::DeviceIndex device) {
  auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(c10::make_intrusive<ir::Storage>(nbytes, dense, device)),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dense.dtype));
  if (dense.sizes.size() != 1 || dense.sizes[0] != 0) {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(dense.sizes, dense.strides);
  }
  return tensor;
}

at::TensorBase view(const at::TensorBase& base, const ir::Geometry& geometry) {
  auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(
      c10::Storage(base.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::scalarTypeToTypeMeta(geometry.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes, geometry.strides,
                                                      geometry.offset);
  return tensor;
}

}  // namespace lazyxla::dispatch
