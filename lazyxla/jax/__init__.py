"""JAX's functions on tensors of the device: recorded, differentiable, part of the program.

`calls` is what users see, `flat_functions` what is traced by JAX, `operator` how that is recorded.
"""
