"""lazyxla: PyTorch on TPU, NVIDIA GPU and CPU through XLA.

Importing it registers the device ``"lazyxla"``. Once it is installed, ``import torch`` does so
itself, unless it finds another accelerator, such as CUDA::

    import torch
    x = torch.ones(2, 3, device="lazyxla")

Importing is cheap: the plugin starts with the first use of a device, and the compiler is imported
with the first graph.
"""

from __future__ import annotations

import atexit
import os
import threading
import time

import torch

from lazyxla.compat import check_extension, check_torch_version

check_extension(torch.__version__)

from lazyxla.interrupts import Deferred  # noqa: E402

with Deferred():  # a module half imported, and imported anew, would register all of it twice
    from lazyxla import (
        _C,
        aot,
        argument_checks,
        batch_norm,
        control_flow,
        determinant,
        device_module,
        distributed,
        fake_quantization,
        flex_attention,
        lowering,
        memory,
        meta_functions,
        model_state,
        optimizer_steps,
        platforms,
        printing,
        recurrent,
        reporting,
        sparse,
        untraced,
        xla_options,
    )
    from lazyxla.aot.compiling import stablehlo
    from lazyxla.buckets import Buckets, bucket
    from lazyxla.cache import kernel_table, program_store, shape_store
    from lazyxla.config import settings
    from lazyxla.dlpack import from_dlpack, host_view
    from lazyxla.environment import (
        Environment,
        default_env,
        disable_globally,
        enable_globally,
        to_device,
    )
    from lazyxla.foreign_functions import register_ffi_target
    from lazyxla.jax.arrays import from_jax, to_jax
    from lazyxla.jax.calls import call_jax, jax_function, jax_key
    from lazyxla.jax.exporting import Exported, export, load_exported
    from lazyxla.jax.jitted import jax_jit
    from lazyxla.jax.kernels import kernel
    from lazyxla.jax.modules import wrap_jax
    from lazyxla.jax.shared_client import share_with_jax
    from lazyxla.jax.views import jax_view
    from lazyxla.loader import DeviceLoader
    from lazyxla.lowering.cpu import kernel_limits
    from lazyxla.memory import (
        empty_cache,
        max_memory_allocated,
        max_memory_reserved,
        mem_get_info,
        memory_allocated,
        memory_reserved,
        memory_stats,
        memory_summary,
        reset_accumulated_memory_stats,
        reset_peak_memory_stats,
    )
    from lazyxla.mesh import Mesh
    from lazyxla.modes import compile, eager_mode, step
    from lazyxla.paged_attention import ragged_paged_attention
    from lazyxla.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        data_parallel,
        fully_shard,
        parallelize,
    )
    from lazyxla.planning import collectives, history
    from lazyxla.random import get_rng_state, set_rng_state
    from lazyxla.random import manual_seed_all as manual_seed
    from lazyxla.rotary import rotary_embedding
    from lazyxla.runtime import (
        BACKEND,
        DeviceProperties,
        counters,
        current_device,
        device,
        device_count,
        devices,
        fallbacks,
        global_device_count,
        is_available,
        platform,
        reset_counters,
        set_device,
        sync,
        synchronize,
    )
    from lazyxla.scan import checkpoint_name, scan_layers
    from lazyxla.spmd import (
        Sharding,
        constrain,
        replicate,
        shard,
        shard_local,
        sharding,
        visualize,
    )
    from lazyxla.steps import trust

__version__ = "0.1.0"

__all__ = [
    "Buckets",
    "ColwiseParallel",
    "DeviceLoader",
    "DeviceProperties",
    "Environment",
    "Exported",
    "Mesh",
    "RowwiseParallel",
    "SequenceParallel",
    "Sharding",
    "aot",
    "bucket",
    "call_jax",
    "check_torch_version",
    "checkpoint_name",
    "compile",
    "constrain",
    "counters",
    "current_device",
    "data_parallel",
    "default_env",
    "device",
    "device_count",
    "devices",
    "disable_globally",
    "eager_mode",
    "empty_cache",
    "enable_globally",
    "export",
    "fallbacks",
    "from_dlpack",
    "from_jax",
    "fully_shard",
    "get_rng_state",
    "global_device_count",
    "host_view",
    "is_available",
    "jax_function",
    "jax_jit",
    "jax_key",
    "jax_view",
    "kernel",
    "load_exported",
    "manual_seed",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_summary",
    "parallelize",
    "platform",
    "ragged_paged_attention",
    "register_ffi_target",
    "replicate",
    "reset_accumulated_memory_stats",
    "reset_counters",
    "reset_peak_memory_stats",
    "rotary_embedding",
    "scan_layers",
    "set_device",
    "set_rng_state",
    "settings",
    "shard",
    "shard_local",
    "sharding",
    "share_with_jax",
    "stablehlo",
    "step",
    "sync",
    "synchronize",
    "to_device",
    "to_jax",
    "visualize",
    "wrap_jax",
]


def _apply_setting(name: str, value: object) -> None:
    """Hands a setting on to C++."""
    setter = getattr(_C, f"set_{name}", None)
    if name == "xla_options":
        _C.set_xla_options(xla_options.parse(str(value)))
    elif setter is not None:
        setter(value)
    elif name in ("platform", "plugin_path", "create_options", "cpu_devices"):
        _report_device_bound()
    elif name == "log_level":
        reporting.set_level(str(value))
    elif name == "cache_dir":
        _open_shape_cache()
        kernel_limits.read_from(kernel_table.kept)
    if name in ("cache_dir", "cache_size", "strict_host_calls"):
        program_store.forget()


def _open_shape_cache() -> None:
    """Sets where PyTorch's answers about shapes are kept between processes."""
    # An answer that is kept is not checked again, so that another build, which may check more,
    # must not take it for its own.
    built = os.stat(_C.__file__)
    version = f"{__version__}-{shape_store.checksum()}-{built.st_size:x}-{built.st_mtime_ns:x}"
    name = f"shapes-{version}-torch-{torch.__version__}.bin"
    path = os.path.join(settings.cache_directory(), name)
    shape_store.use(path)


def _report_device_bound() -> None:
    """Sets in C++ how many devices there can be, since PyTorch asks before any is started."""
    try:
        bound = platforms.resolve().device_bound
    except platforms.UNAVAILABLE:
        bound = 0  # nothing to run on; the first use of a device raises why
    _C.set_device_count_bound(bound)


def _let_autograd_finish() -> None:
    """Gives autograd's threads the GIL once more before the interpreter ends.

    PyTorch's engine drops Python objects in the device's thread after backward() has returned. If
    that thread has to ask an ending interpreter for the GIL, it takes the process along.
    """
    time.sleep(0.01)


def _register() -> None:
    """Makes "lazyxla" a device type of torch. Once per process."""
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", BACKEND):
        raise ImportError(
            f"torch can hold one backend besides its own, and {taken!r} has taken that place. To "
            "use lazyxla, uninstall the other one or set TORCH_DEVICE_BACKEND_AUTOLOAD=0."
        )
    settings.on_change(_apply_setting)
    if threading.current_thread() is threading.main_thread():
        _C.watch_signals()
    atexit.register(_let_autograd_finish)
    atexit.register(shape_store.flush)
    atexit.register(_C.stop_threads)
    _C.set_plugin_provider(platforms.provide)
    _C.install_inference_store(shape_store.find, shape_store.add)
    _C.install_program_store(program_store.stored_graph)
    if hasattr(torch, BACKEND):  # the package was imported anew; torch keeps what it has
        return
    torch.utils.rename_privateuse1_backend(BACKEND)
    torch._register_device_module(BACKEND, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    lowering.allow_host_calls(_C.takes_host_calls, lambda: settings.strict_host_calls)
    kernel_limits.read_from(kernel_table.kept)
    _C.install_lowering(reporting.lower, lowering.how, lowering.check_lowering)
    argument_checks.install()
    batch_norm.install()
    determinant.install()
    _C.register_operators(lowering.names())  # but for those that have a kernel by now
    _C.install_planner(history.plan, collectives.cut_at_collectives, collectives.arrange)
    _C.install_result_reader(lowering.result_tiles)
    _C.install_listeners(reporting.loaded, reporting.on_host, reporting.cut)
    _C.install_tensor_descriptions(reporting.names_of, memory.largest_tensors)
    _C.set_library_paths(reporting.LIBRARIES)
    lowering.on_change(_C.rule_changed)
    lowering.on_change(lambda *_: program_store.forget())
    meta_functions.install()
    recurrent.install()
    fake_quantization.install()
    sparse.install()
    model_state.install()
    distributed.install()
    control_flow.install()
    flex_attention.install()
    printing.install()
    optimizer_steps.install()
    trust.install()
    # Half precision is PyTorch's own default here; every XLA platform is better at this one.
    torch.set_autocast_dtype(BACKEND, torch.bfloat16)
    untraced.mark(__name__)


with Deferred():
    _register()
