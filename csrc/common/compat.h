// Where versions of torch's, XLA's and Python's C++ headers differ: torch 2.11 to 2.15, jaxlib 0.10
// to 0.12, Python 3.11 to 3.14.
//
// No other file asks for a version. Everything that has another name, argument or type in one of
// them gets one name here, which is chosen by what the headers have, not by their number where that
// is possible. docs/versions.md says what was compiled against what.
//
// It includes none of these headers: a file gets here what it included before.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

namespace lazyxla::compat {

#ifdef XLA_FFI_API_C_API_H_
// The list that begins at a call frame's extension_start: XLA_FFI_Extension_Base, which from
// jaxlib 0.11 on is called XLA_FFI_InternalExtension. Its layout is the same.
using FfiExtension = std::remove_pointer_t<decltype(XLA_FFI_CallFrame::extension_start)>;
#endif

// An object that pointers of this kind own: those to nodes of autograd are std::shared_ptr before
// torch 2.13, and count in the node from then on.
template <typename Pointer, typename T, typename... Args>
Pointer make_owned(Args&&... args) {
  if constexpr (requires { typename Pointer::weak_type; }) {
    return std::make_shared<T>(std::forward<Args>(args)...);
  } else {
    return Pointer::reclaim(new T(std::forward<Args>(args)...));
  }
}

#ifdef Py_PYTHON_H
// The version tag of a dict, which changes whenever it is written to (PEP 509). 0 from Python 3.12
// on, which has none.
inline uint64_t dict_version(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  static_cast<void>(dict);
  return 0;
#endif
}

// The version number of a class: another one after each assignment to the class or to one of its
// bases. 0 if the interpreter has none for it. From Python 3.13 on there is no flag beside it.
inline unsigned type_version(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  static PyObject* const name = PyUnicode_InternFromString("forward");
  _PyType_Lookup(type, name);  // which assigns one
#else
  PyUnstable_Type_AssignVersionTag(type);
#endif
#if PY_VERSION_HEX < 0x030D0000
  if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
  return type->tp_version_tag;
}
#endif

}  // namespace lazyxla::compat
