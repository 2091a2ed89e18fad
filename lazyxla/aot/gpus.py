"""NVIDIA's GPUs by name, described as XLA's compiler wants it when there is none to ask."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """A model of GPUs; sizes in bytes."""

    kind: str
    """Its name as its driver reports it."""
    compute_capability: tuple[int, int]
    cores: int
    """Streaming multiprocessors."""
    fpus_per_core: int
    shared_memory_per_core: int
    clock_ghz: float
    memory: int
    bytes_per_second: int
    """Bandwidth of its memory."""
    l2_cache: int
    threads_per_core: int = 2048

    def target_config(self) -> str:
        """A GpuTargetConfigProto of XLA's (xla/stream_executor/device_description.proto)."""
        major, minor = self.compute_capability
        # The runtime keeps one KiB of each block's shared memory for itself.
        shared_memory_of_block = self.shared_memory_per_core - 1024
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.kind}"
            dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} }}
            gpu_device_info {{
              name: "{self.kind}"
              device_vendor: "NVIDIA Corporation"
              cuda_compute_capability {{
                major: {major} minor: {minor}
                feature_extension: {"ACCELERATED_FEATURES" if major >= 9 else "NONE"}
              }}
              core_count: {self.cores}
              fpus_per_core: {self.fpus_per_core}
              clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bytes_per_second}
              l2_cache_size: {self.l2_cache}
              shared_memory_per_core: {self.shared_memory_per_core}
              shared_memory_per_block: {48 << 10}
              shared_memory_per_block_optin: {shared_memory_of_block}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              threads_per_warp: 32
              threads_per_core_limit: {self.threads_per_core}
              threads_per_block_limit: 1024
              thread_dim_limit_x: 1024
              thread_dim_limit_y: 1024
              thread_dim_limit_z: 64
              block_dim_limit_x: {(1 << 31) - 1}
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}
        """


# As in XLA's own specifications.
_CUDNN = (9, 10)

# From the specifications in xla/backends/gpu/target_config, and NVIDIA's CUDA programming guide.
# XLA has no specification of the L4: its numbers are those of its data sheet, the memory is about
# what is left for programs.
_H100 = Gpu(
    "NVIDIA H100 80GB HBM3",
    compute_capability=(9, 0),
    cores=132,
    fpus_per_core=128,
    shared_memory_per_core=228 << 10,
    clock_ghz=1.98,
    memory=84_942_979_072,
    bytes_per_second=3_352_320_000_000,
    l2_cache=50 << 20,
)

GPUS = {
    "l4": Gpu(
        "NVIDIA L4",
        compute_capability=(8, 9),
        cores=58,
        fpus_per_core=128,
        shared_memory_per_core=100 << 10,
        clock_ghz=2.04,
        memory=24_152_899_584,
        bytes_per_second=300_000_000_000,
        l2_cache=48 << 20,
        threads_per_core=1536,
    ),
    "a100": Gpu(
        "NVIDIA A100-SXM4-80GB",
        compute_capability=(8, 0),
        cores=108,
        fpus_per_core=64,
        shared_memory_per_core=164 << 10,
        clock_ghz=1.41,
        memory=85_100_068_864,
        bytes_per_second=2_039_040_000_000,
        l2_cache=40 << 20,
    ),
    "h100": _H100,
    "h200": _H100._replace(
        kind="NVIDIA H200", memory=151_397_597_184, bytes_per_second=4_800_000_000_000
    ),
    "b200": _H100._replace(
        kind="NVIDIA B200",
        compute_capability=(10, 0),
        cores=148,
        clock_ghz=1.965,
        memory=191_514_411_008,
        bytes_per_second=7_672_320_000_000,
        l2_cache=132_644_864,
    ),
}
