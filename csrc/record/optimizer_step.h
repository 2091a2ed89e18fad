// Optimizer steps: whether the calling thread is in one.
//
// What an optimizer does in its first step and never again, or does with other numbers each time,
// would make another program of that step. So the memory that it makes for its state is filled by
// programs of its own, and the numbers that it multiplies and adds are inputs from the start.
#pragma once

namespace lazyxla::graph {

bool in_optimizer_step();

// To be called once. (torch.optim.Optimizer tells PyTorch's profiler where a step begins and ends.)
void watch_optimizer_steps();

}  // namespace lazyxla::graph
