#include "dispatch/region_inputs.h"

#include "dispatch/tensor.h"
#include "record/flush.h"

namespace lazyxla::dispatch {

void RegionInputs::add(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  // A subclass that stands for other tensors, such as DTensor, has no memory of its own.
  if (!is_lazy(impl) || impl.is_python_dispatch() || !impl.has_storage()) return;
  if (tensor.numel() == 0) return;
  ir::Storage& storage = storage_of(impl);
  if (tensor.numel() * tensor.itemsize() >= storage.nbytes()) return;  // it is all of it
  const ir::Geometry geometry = geometry_of(impl);
  const at::TensorBase copy = make_tensor(ir::Geometry::contiguous(geometry.dtype, geometry.sizes),
                                          geometry.nbytes(), tensor.device().index());
  ir::Value before;
  record::run_apart(tensor.device().index(), [&](ir::PendingSet& pending, ir::Garbage& garbage) {
    before = storage.value();
    write(*copy.unsafeGetTensorImpl(), read(storage, geometry, pending), pending, garbage);
  });
  const ir::Storage& made = storage_of(*copy.unsafeGetTensorImpl());
  std::lock_guard lock(storage.mutex());
  const bool is_leaf = made.value() && made.value().node->is_leaf();
  // Another thread may have written to it meanwhile.
  if (!before || storage.value().node.get() != before.node.get() || !is_leaf) return;
  storage.keep_view({geometry, made.value()});
  copies_.push_back({tensor.storage(), made.value()});
}

RegionInputs::~RegionInputs() {
  for (const Copy& copy : copies_) {
    ir::Storage& storage = ir::Storage::of(*copy.storage.unsafeGetStorageImpl());
    ir::Garbage garbage;  // dropped after the mutex
    std::lock_guard lock(storage.mutex());
    storage.forget_view(copy.leaf, garbage);
  }
}

}  // namespace lazyxla::dispatch
