// lazyxla::matmul.out, which programs for the CPU call (lazyxla/lowering/cpu/matmul_kernels.py):
// PyTorch's matmul, of matrices as they are in memory, into the program's own memory.
#include <ATen/ops/bmm.h>
#include <ATen/ops/mm.h>
#include <torch/library.h>

namespace lazyxla::dispatch {
namespace {

// `turn_left`: the rows of the left operand are its last dimension, `turn_right`: so are those of
// the right one, or of each of a batch.
at::Tensor& matmul_out(const at::Tensor& left, const at::Tensor& right, bool turn_left,
                       bool turn_right, at::Tensor& out) {
  const at::Tensor a = turn_left ? left.transpose(-2, -1) : left;
  const at::Tensor b = turn_right ? right.transpose(-2, -1) : right;
  return a.dim() == 2 ? at::mm_out(out, a, b) : at::bmm_out(out, a, b);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(lazyxla, m) {
  m.def(
      "matmul.out(Tensor left, Tensor right, bool turn_left, bool turn_right, *, "
      "Tensor(a!) out) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(lazyxla, CPU, m) { m.impl("matmul.out", &matmul_out); }

}  // namespace lazyxla::dispatch
