// Operators on memory rather than on elements: creating, resizing, viewing and re-pointing tensors.
#pragma once

#include <c10/core/TensorImpl.h>

#include "ir/storage.h"

namespace lazyxla::dispatch {

// Gives the storage exactly this many bytes. The content is kept as far as it fits; new memory is
// uninitialised.
void resize_storage(ir::Storage& storage, size_t nbytes);

// Makes sure that the tensor's storage has room for `nbytes`.
void reserve_storage(c10::TensorImpl& tensor, size_t nbytes);

}  // namespace lazyxla::dispatch
