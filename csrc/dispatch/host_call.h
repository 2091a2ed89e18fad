// Host calls: PyTorch's CPU kernels that run inside a program, on the CPU's platform: operators
// without an XLA form, and, split into parts, those whose kernels are faster than what XLA makes of
// them.
//
// There a device's memory is the host's own, so that PyTorch's CPU kernels can work on it in place.
// One handler (pjrt/ffi.h) serves all operators; each call of it says which:
//
//     %1:2 = stablehlo.custom_call @lazyxla.host_call(%0) {api_version = 4, backend_config = {
//              operator = "aten::linalg_qr", arguments = {A = 0, mode = "reduced"}}}
//
// An argument that is a tensor or a number (Tensor, Scalar, float, and lists of them) is given by
// its index among the custom call's operands, -1 being None in a list; every other by its value;
// one left out is None. All that a call needs is in the program, so that a program kept on disk
// works in another process. Operands and results are row-major; the results are the operator's own,
// undefined tensors left out.
//
// The plugin's threads share a call with the attribute `split` (parts.h): one dimension for each
// operand, then for each result, along which it is cut, -1 for what each part needs as a whole.
// `divided` names an integer argument that the parts share, as a convolution's groups:
//
//     {operator = "aten::linear", arguments = {input = 0, weight = 1}, split = array<i64: 0, -1,
//     0>}
//
// The kernel takes the matrices that `transposed` numbers as their transposes: array<i64: 1>.
//
// The kernel runs without the GIL, on the plugin's threads or on the one that flushed. What it
// throws is the execution's error, which is raised when one of the program's results is read.
#pragma once

struct XLA_FFI_CallFrame;  // of xla/ffi/api/c_api.h

namespace lazyxla::dispatch {

// The handler. Throws what the kernel throws, as std::runtime_error with the operator's name.
void host_call(const XLA_FFI_CallFrame& frame);

}  // namespace lazyxla::dispatch
