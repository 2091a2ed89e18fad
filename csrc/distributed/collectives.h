// Collectives: operators that exchange tensors with the other processes of a group.
//
// They are operators of PyTorch's dispatcher, recorded like any other, so that forward,
// collectives, backward and optimizer are one program:
//
//     lazyxla_c10d::all_reduce(Tensor[] inputs, str group, int op) -> Tensor[]
//
// Where the client's devices are those of all processes, they are the compiler's own collectives,
// each in a program that its group runs together (program/replicas.h). On the CPU, where the client
// is one process's, a program calls their kernels (dispatch/host_call.h), which hand the data to
// the group's transport, a process group of PyTorch's. They run there one after the other, in the
// order in which they were recorded: the last of the inputs is a token, a number that each of them
// takes from the one recorded before, and the last of the results is that number plus one. The
// token also keeps alive a collective whose result is never read, and identifies the recorded call
// that runs. Processes must agree on this order, and on nothing else; agreement.h checks it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

namespace lazyxla::distributed {

// Recorded calls, on tensors of the device. Each takes and leaves the token.
std::vector<at::Tensor> all_reduce(const std::vector<at::Tensor>& inputs, const std::string& group,
                                   c10d::ReduceOp::RedOpType op);
std::vector<at::Tensor> broadcast(const std::vector<at::Tensor>& inputs, const std::string& group,
                                  int64_t root);
// Every process's input in turn: [processes, *shape].
std::vector<at::Tensor> all_gather(const std::vector<at::Tensor>& inputs, const std::string& group,
                                   int64_t processes);
// Of inputs [processes, *shape], this process's part.
std::vector<at::Tensor> reduce_scatter(const std::vector<at::Tensor>& inputs,
                                       const std::string& group, c10d::ReduceOp::RedOpType op);
// Sends `sent_rows` rows of the input to each process, and receives a number from each. `even`: all
// processes know that all numbers of rows are equal.
at::Tensor all_to_all(const at::Tensor& input, const std::string& group,
                      const std::vector<int64_t>& sent_rows,
                      const std::vector<int64_t>& received_rows, bool even);
// Does not wait until it is received.
void send(const at::Tensor& input, const std::string& group, int64_t peer, int64_t tag);
// Lets the peer send a tensor of this shape. What was started is finished in the same order.
void start_receive(const at::Tensor& like, const std::string& group, int64_t peer, int64_t tag);
at::Tensor finish_receive(const at::Tensor& like, const std::string& group, int64_t peer,
                          int64_t tag);

// From the first call on, collectives of c10d on the host's tensors, which Gloo serves beside our
// group, first start what is recorded, if a collective is in it, or if it may be for the devices of
// several processes. Otherwise both would hang where one process reads a loss, and so waits for the
// others to run the collectives before it; they only recorded these, and wait for it in a
// collective on the host, such as `all_gather_object`.
void run_recorded_before_host_collectives();

// Gives the program room the functions that launch collectives which the processes of a group run
// together (program/replicas.h).
void install_collective_launches();

}  // namespace lazyxla::distributed
