"""The device as PyTorch's generic code sees it: strings, modules, guards, imports."""

from __future__ import annotations

import os
import sys
import textwrap
import threading

import pytest
import torch

import lazyxla

# --- Threads --------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are Linux'")
def test_compute_threads_do_not_interrupt_those_that_hand_out_work(run_python):
    """In a process of its own: JAX has compute threads, too, and other tests start it."""
    run_python(
        """
import os, pathlib, torch, lazyxla
torch.ones(1, device="lazyxla").cpu()  # starts the plugin
threads = pathlib.Path("/proc/self/task")
names = {int(path.parent.name): path.read_text().strip() for path in threads.glob("*/comm")}
compute = {thread for thread, name in names.items() if name == "tf_XLAEigen"}
assert compute
assert {os.sched_getscheduler(thread) for thread in compute} == {os.SCHED_BATCH}
assert {os.sched_getscheduler(thread) for thread in names.keys() - compute} == {os.SCHED_OTHER}
"""
    )


# --- Names ---------------------------------------------------------------------------------------


def test_device_strings():
    assert torch.device("lazyxla").type == "lazyxla"
    assert torch.device("lazyxla:1").index == 1
    assert torch.device("lazyxla", 0) == lazyxla.device(0)


def test_devices():
    assert lazyxla.device_count() == torch.accelerator.device_count() == 2
    found = [x.device for x in lazyxla.devices()]
    assert found == [torch.device("lazyxla:0"), torch.device("lazyxla:1")]
    assert lazyxla.device() == torch.device("lazyxla", lazyxla.current_device())
    assert lazyxla.is_available()
    assert torch.lazyxla.is_available()
    assert lazyxla.platform() == "cpu"


@pytest.mark.parametrize("index", [-1, 2, 200])
def test_no_such_device(index):
    with pytest.raises(IndexError, match=rf"device index {index} is out of range.*2 devices"):
        lazyxla.device(index)


def test_set_no_such_device():
    with pytest.raises(IndexError, match=r"device index 5 is out of range, there are 2 devices"):
        lazyxla.set_device(5)


def test_foreign_device():
    with pytest.raises(ValueError, match="expected a lazyxla device, got cpu"):
        lazyxla.set_device("cpu")


def test_generated_methods():
    assert isinstance(torch.Tensor.is_lazyxla, property)
    for owner in (
        torch.Tensor,
        torch.nn.Module,
        torch.nn.utils.rnn.PackedSequence,
        torch.UntypedStorage,
    ):
        assert callable(owner.lazyxla)
    assert not torch.ones(2).is_lazyxla


def test_device_module_is_found():
    assert torch.get_device_module("lazyxla") is torch.lazyxla
    assert torch.accelerator.current_accelerator() == torch.device("lazyxla")
    assert torch.accelerator.is_available()


def test_device_module_has_what_it_lists():
    module = torch.lazyxla
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_public_names_exist():
    assert [name for name in lazyxla.__all__ if not hasattr(lazyxla, name)] == []


def test_supported_dtypes():
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64} <= dtypes
    assert torch.qint8 not in dtypes


def test_properties():
    properties = torch.lazyxla.get_device_properties(0)
    assert properties.platform == "cpu"
    assert properties.name == torch.lazyxla.get_device_name("lazyxla:0") != ""
    first, second = lazyxla.devices()
    assert first == properties
    assert (first.id, second.id) == (0, 1)
    assert second.process_index == 0
    assert second.coordinates is None
    assert second.total_memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# --- Guards --------------------------------------------------------------------------------------


def test_device_context():
    assert lazyxla.current_device() == 0
    with torch.lazyxla.device(1):
        assert lazyxla.current_device() == 1
        with torch.lazyxla.device("lazyxla:0"):
            assert lazyxla.current_device() == 0
        with torch.lazyxla.device(None), torch.lazyxla.device(-1):
            assert lazyxla.current_device() == 1
    assert lazyxla.current_device() == 0


def test_a_device_context_is_entered_again():
    context = torch.lazyxla.device(1)
    with context:
        with context:
            lazyxla.set_device(0)
        assert lazyxla.current_device() == 1
    assert lazyxla.current_device() == 0
    with context:
        assert lazyxla.current_device() == 1


def test_device_context_after_an_error():
    with pytest.raises(KeyError), torch.lazyxla.device(1):
        raise KeyError
    assert lazyxla.current_device() == 0


def test_device_of_leaves_foreign_tensors_alone():
    with torch.lazyxla.device(1), torch.lazyxla.device_of(torch.ones(1)):
        assert lazyxla.current_device() == 1


def test_accelerator_device_index():
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == lazyxla.current_device() == 1
    torch.accelerator.set_device_index(1)
    assert lazyxla.current_device() == 1
    lazyxla.set_device("lazyxla:0")
    assert torch.accelerator.current_device_index() == 0


def test_current_device_belongs_to_a_thread():
    seen = []

    def body():
        seen.append(lazyxla.current_device())
        lazyxla.set_device(0)

    with torch.lazyxla.device(1):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        assert lazyxla.current_device() == 1
    assert seen == [0]


# --- Autocast ------------------------------------------------------------------------------------


def test_autocast():
    assert torch.amp.is_autocast_available("lazyxla")
    with torch.autocast("lazyxla"):
        assert torch.is_autocast_enabled("lazyxla")
        assert torch.get_autocast_dtype("lazyxla") == torch.bfloat16
    with torch.autocast("lazyxla", dtype=torch.float16):
        assert torch.get_autocast_dtype("lazyxla") == torch.float16
    with pytest.warns(UserWarning, match="lazyxla Autocast only supports dtypes"):
        torch.autocast("lazyxla", dtype=torch.float64)


# --- Import --------------------------------------------------------------------------------------


def test_import_is_light(run_python):
    run_python(
        """
import sys
import torch
import lazyxla
torch.manual_seed(0)
x = torch.ones(3, requires_grad=True)
(x * x).sum().backward()  # autograd asks for the number of devices
heavy = [name for name in ("jax", "jaxlib", "jax.numpy", "numpy.f2py") if name in sys.modules]
assert heavy == [], heavy
assert not lazyxla._C.initialized()
assert lazyxla.is_available() and lazyxla.device_count() == 2 and lazyxla.platform() == "cpu"
assert not lazyxla._C.initialized()
libraries = open("/proc/self/maps").read()
assert "xla_cpu_pjrt" not in libraries
"""
    )


@pytest.mark.parametrize("order", ["import torch, lazyxla", "import lazyxla, torch"])
def test_import_order(run_python, order):
    run_python(f"{order}\nassert torch.lazyxla.device_count() == 2")


def test_autoload(run_python):
    from importlib.metadata import entry_points

    if not [entry for entry in entry_points(group="torch.backends") if entry.name == "lazyxla"]:
        pytest.skip("lazyxla is not installed, only on the path")
    run_python("import torch; assert torch.device('lazyxla').type == 'lazyxla'")
    run_python(
        "import sys, torch; assert 'lazyxla' not in sys.modules; import lazyxla; torch.lazyxla",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


@pytest.mark.parametrize(("found", "loads"), [(None, True), ("cuda", False)])
def test_another_accelerator_is_left_alone(run_python, found, loads):
    """PyTorch computes no gradients on CUDA devices where another backend is registered."""
    script = f"""
        import os, sys, torch, lazyxla_autoload
        asked = []

        def current_accelerator(check_available):
            asked.append((check_available, os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]))
            return {found!r} and torch.device({found!r})

        torch.accelerator.current_accelerator = current_accelerator
        lazyxla_autoload.autoload()
        assert ("lazyxla" in sys.modules) == {loads}
        assert asked == [(True, "1")] and "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
        import lazyxla
        assert torch.device("lazyxla").type == "lazyxla"
    """
    run_python(textwrap.dedent(script), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_another_backend_was_first(run_python):
    result = run_python(
        "import torch; torch.utils.rename_privateuse1_backend('other'); import lazyxla",
        check=False,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert "ImportError" in result.stderr
    assert "'other' has taken that place" in result.stderr


def test_torch_version_check():
    lazyxla.check_torch_version("2.13.0+cpu", "2.13.1+cu130")
    with pytest.raises(ImportError) as error:
        lazyxla.check_torch_version("2.13.0+cpu", "2.12.1")
    for part in ("torch 2.13.0+cpu", "torch 2.12.1", "+torch2.12", "--no-build-isolation"):
        assert part in str(error.value)


def test_forked_child_is_told(run_python):
    result = run_python(
        """
import os, sys, torch, lazyxla
lazyxla._C.platform()  # starts the client
assert lazyxla._C.initialized()
child = os.fork()
if child == 0:
    assert torch.lazyxla._is_in_bad_fork()
    torch.manual_seed(3)
    try:
        lazyxla.set_device(0)
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(0)
    os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    )
    assert "fork" in result.stdout
