// Checks of what c10d's calls are given. They are made at the call: an error of a collective that
// is recorded comes when its program runs, and is the end of the group.
//
// What a process cannot see, such as the sizes of the others' tensors, is compared when the call
// runs (agreement.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <cstdint>
#include <vector>

namespace lazyxla::distributed {

// Throw a ValueError. `size`: how many processes the group has.

void check_root(int64_t root, int size);
// `peer`: whom the process of this rank sends to or receives from.
void check_peer(int64_t peer, int rank, int size);
// There are as many of `what` as expected.
void check_count(size_t count, const char* what, size_t expected);
// A list has as many as the group has processes; of `what`, "results".
void check_one_for_each(size_t count, const char* what, int size);
// A list of one tensor for each process, each like `part` in number of elements and dtype.
void check_parts(at::TensorList parts, const at::Tensor& part, const char* what, int size);
// For each tensor a list of one like it for each process.
void check_lists(const std::vector<std::vector<at::Tensor>>& lists, at::TensorList tensors,
                 const char* what, int size);
// Whether the tensors of a list have several sizes.
bool is_uneven(at::TensorList list);
// A tensor of all processes' parts, and one process's.
void check_whole(const at::Tensor& whole, const at::Tensor& part, int size);
// Whether the dtypes can be reduced so: none of 8-bit floats, and only integers bit by bit.
void check_reduction(at::TensorList tensors, c10d::ReduceOp::RedOpType op);

// The rows that each process is sent, or received from, for split sizes or, if there are none, in
// equal parts.
std::vector<int64_t> rows_for_each(const at::Tensor& x, const std::vector<int64_t>& split,
                                   int size);
// What is exchanged row by row. `even`: there are no split sizes.
void check_exchange(const at::Tensor& output, const at::Tensor& input, bool even);
// The same of lists, which have any tensors of one dtype.
void check_exchange_of_lists(at::TensorList outputs, at::TensorList inputs, int size);

}  // namespace lazyxla::distributed
