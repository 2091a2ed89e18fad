#include "distributed/argument_checks.h"

#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace lazyxla::distributed {
namespace {

using Op = c10d::ReduceOp::RedOpType;

int64_t elements_of_row(const at::Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(x.dim() > 0 ? 1 : 0));
}

}  // namespace

void check_root(int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "lazyxla: invalid root rank ", root,
                    " in a group of ", size, " processes");
}

void check_peer(int64_t peer, int rank, int size) {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size, "lazyxla: invalid rank ", peer,
                    " to send to or receive from, in a group of ", size, " processes");
  TORCH_CHECK_VALUE(peer != rank, "lazyxla: process ", rank,
                    " cannot send to or receive from itself");
}

void check_count(size_t count, const char* what, size_t expected) {
  TORCH_CHECK_VALUE(count == expected, "lazyxla: ", expected, " ", what, " were expected, not ",
                    count);
}

void check_one_for_each(size_t count, const char* what, int size) {
  TORCH_CHECK_VALUE(count == static_cast<size_t>(size), "lazyxla: ", size, " ", what,
                    " were expected, one for each process, not ", count);
}

void check_parts(at::TensorList parts, const at::Tensor& part, const char* what, int size) {
  check_one_for_each(parts.size(), what, size);
  for (const at::Tensor& each : parts) {
    TORCH_CHECK_VALUE(each.numel() == part.numel() && each.dtype() == part.dtype(),
                      "lazyxla: each of the ", what, " has as many elements as the tensor, ",
                      part.sizes(), " of ", part.dtype(), ", but one is ", each.sizes(), " of ",
                      each.dtype());
  }
}

void check_lists(const std::vector<std::vector<at::Tensor>>& lists, at::TensorList tensors,
                 const char* what, int size) {
  TORCH_CHECK_VALUE(lists.size() == tensors.size(), "lazyxla: ", tensors.size(), " lists of ", what,
                    " were expected, not ", lists.size());
  for (size_t i = 0; i < lists.size(); ++i) check_parts(lists[i], tensors[i], what, size);
}

bool is_uneven(at::TensorList list) {
  return std::any_of(list.begin(), list.end(),
                     [&](const at::Tensor& x) { return x.numel() != list[0].numel(); });
}

void check_whole(const at::Tensor& whole, const at::Tensor& part, int size) {
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * size && whole.dtype() == part.dtype(),
                    "lazyxla: a tensor of all ", size, " processes has ", whole.numel(),
                    " elements of ", whole.dtype(), ", one process's part has ", part.numel(),
                    " of ", part.dtype());
}

void check_reduction(at::TensorList tensors, Op op) {
  const bool is_bitwise = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  for (const at::Tensor& x : tensors) {
    TORCH_CHECK_VALUE(!c10::isFloat8Type(x.scalar_type()), "lazyxla: tensors of ", x.dtype(),
                      " are not reduced; gather them, or reduce wider ones");
    TORCH_CHECK_VALUE(!is_bitwise || c10::isIntegralType(x.scalar_type(), /*includeBool=*/true),
                      "lazyxla: only integers are reduced bit by bit, not ", x.dtype());
  }
}

std::vector<int64_t> rows_for_each(const at::Tensor& x, const std::vector<int64_t>& split,
                                   int size) {
  if (!split.empty()) {
    const int64_t total = c10::sum_integers(split);
    const int64_t rows = x.dim() > 0 ? x.size(0) : 0;
    const bool none_is_negative =
        std::all_of(split.begin(), split.end(), [](int64_t each) { return each >= 0; });
    TORCH_CHECK_VALUE(
        rows == total && none_is_negative && split.size() == static_cast<size_t>(size),
        "lazyxla: of split sizes there is one for each process, and their sum is the number of "
        "rows: the tensor has ",
        rows, " rows, the group ", size, " processes, the sizes are ", c10::IntArrayRef(split));
    return split;
  }
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(0) % size == 0, "lazyxla: the first dimension of ",
                    x.sizes(), " is not divisible by the group's size, ", size);
  return std::vector<int64_t>(size, x.size(0) / size);
}

void check_exchange(const at::Tensor& output, const at::Tensor& input, bool even) {
  TORCH_CHECK_VALUE(input.dtype() == output.dtype(), "lazyxla: ", input.dtype(), " is sent and ",
                    output.dtype(), " received");
  TORCH_CHECK_VALUE(!even || input.numel() == output.numel(),
                    "lazyxla: without split sizes as much is received as sent: of a tensor of ",
                    input.sizes(), " not ", output.sizes());
  TORCH_CHECK_VALUE(even || input.numel() == 0 || output.numel() == 0 ||
                        elements_of_row(input) == elements_of_row(output),
                    "lazyxla: rows of ", input.sizes(), " are sent and rows of ", output.sizes(),
                    " received, which have other numbers of elements");
}

void check_exchange_of_lists(at::TensorList outputs, at::TensorList inputs, int size) {
  check_one_for_each(inputs.size(), "tensors to send", size);
  check_one_for_each(outputs.size(), "tensors to receive", size);
  for (const at::TensorList& list : {outputs, inputs}) {
    for (const at::Tensor& x : list) {
      TORCH_CHECK_VALUE(x.dtype() == inputs[0].dtype(),
                        "lazyxla: the tensors of an exchange have one dtype, not ",
                        inputs[0].dtype(), " and ", x.dtype());
    }
  }
}

}  // namespace lazyxla::distributed
