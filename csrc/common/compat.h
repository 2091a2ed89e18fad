// Where versions of torch's and XLA's C++ headers differ: torch 2.11 to 2.15, jaxlib 0.10 to 0.12.
//
// No other file asks for a version. Whatever has another name, another argument or another type in
// one of them gets one name here, which is chosen by what the headers have, not by their number
// where that is possible. docs/versions.md says what was compiled against what.
#pragma once

#include <xla/ffi/api/c_api.h>

#include <type_traits>

namespace lazyxla::compat {

// The list that begins at a call frame's extension_start: XLA_FFI_Extension_Base, which from
// jaxlib 0.11 on is called XLA_FFI_InternalExtension. Its layout is the same.
using FfiExtension = std::remove_pointer_t<decltype(XLA_FFI_CallFrame::extension_start)>;

}  // namespace lazyxla::compat
