"""PyTorch's own tests for many processes on the device: ``python -m tests.upstream.distributed``.

They are written for CUDA and NCCL. `names` puts the device's name and its process group's into them
while they are imported, `worker` runs each test in processes of its own, and the rest is
tests.upstream.
"""
