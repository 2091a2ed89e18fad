"""Beside JAX.

JAX's functions on tensors of the device are recorded, differentiable, part of the program: `calls`
is what users see, `flat_functions` what is traced by JAX, `operator` how that is recorded,
`modules` makes Flax's modules PyTorch's, `kernels` makes kernels operators.

PyTorch's functions on JAX's arrays: `views` is what users see, `torch_functions` what is traced by
PyTorch, `primitive` how JAX calls that, `exporting` what runs without PyTorch.

`arrays` and `shared_client` hand tensors and arrays over.
"""
