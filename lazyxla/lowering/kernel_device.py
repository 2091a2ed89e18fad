"""The device that JAX lowers a kernel for, when the kernel or the lowering asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from lazyxla.lowering.program import Target

_OF_TWO_CORES = ("TPU v4", "TPU v5", "TPU v5p")

# By compute capability, from the oldest for which XLA has Triton. JAX knows these models by name
# and lowers a kernel by the capability alone: they stand for all that have it.
_GPUS = {
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H100",
    (10, 0): "NVIDIA B200",
    (10, 3): "NVIDIA B300",
    (12, 0): "NVIDIA RTX PRO 6000",
    (12, 1): "NVIDIA GB10",
}


class KernelDevice(NamedTuple):
    """A device in JAX's words, those of ``jax.sharding.AbstractDevice``."""

    device_kind: str
    num_cores: int
    platform: str


def kernel_device(target: Target) -> KernelDevice | None:
    """The device of a target; None if kernels do not depend on it, or JAX does not know it."""
    if target.platform == "tpu" and target.device_kind:
        cores = 2 if target.device_kind in _OF_TWO_CORES else 1
        return KernelDevice(target.device_kind, cores, "tpu")
    if target.platform == "cuda" and target.compute_capability in _GPUS:
        return KernelDevice(_GPUS[target.compute_capability], 1, "gpu")
    return None
