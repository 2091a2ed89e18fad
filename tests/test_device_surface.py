"""The device as PyTorch's generic code sees it: strings, modules, generators, guards, settings."""

from __future__ import annotations

import os
import sys
import textwrap
import threading

import pytest
import torch

import lazyxla
from lazyxla import _C

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


# --- Streams and events --------------------------------------------------------------------------


def test_one_stream_per_device():
    stream = torch.lazyxla.current_stream()
    assert stream.stream_id == 0
    assert stream == torch.lazyxla.default_stream() == torch.accelerator.current_stream()
    assert torch.Stream("lazyxla:1").device == torch.device("lazyxla:1")
    assert torch.Stream("lazyxla:0") != stream
    assert stream.query()
    stream.synchronize()
    torch.accelerator.set_stream(stream)


def test_stream_context():
    stream, before = torch.Stream("lazyxla:1"), torch.lazyxla.current_stream()
    for context in (torch.lazyxla.stream(stream), stream):
        with context:
            assert lazyxla.current_device() == 1
            assert torch.accelerator.current_stream() == torch.lazyxla.current_stream() == stream
            assert torch.lazyxla.default_stream().stream_id == 0
            assert torch.ones(2, device="lazyxla").device.index == 1
        assert lazyxla.current_device() == 0
        assert torch.lazyxla.current_stream() == before
    with torch.lazyxla.stream(None):
        assert lazyxla.current_device() == 0


def test_synchronize():
    torch.accelerator.synchronize()
    lazyxla.synchronize("lazyxla:1")
    lazyxla.sync(wait=True)


def test_events():
    stream = torch.lazyxla.current_stream()
    event = torch.Event("lazyxla")
    assert event.query()  # never recorded
    event.record()
    event.synchronize()
    assert event.query()
    event.wait(stream)
    stream.wait_event(stream.record_event())
    stream.wait_stream(torch.Stream("lazyxla:1"))


def test_an_event_is_recorded_while_another_thread_waits_for_it(run_python):
    """What is waited for may have to be lowered, which needs the GIL."""
    code = """
import threading, torch, lazyxla
event = torch.Event("lazyxla")
for size in range(10):
    x = torch.ones(size + 3, device="lazyxla")
    for _ in range(30):
        x = (x * 1.5).sin()  # a new program each time
    event.record()
    waiting = threading.Thread(target=event.synchronize)
    waiting.start()
    while waiting.is_alive():
        event.record()
    event.synchronize()
print(lazyxla.counters()["lowerings"])
"""
    assert int(run_python(code).stdout) >= 10


def test_event_times():
    start, end = (torch.Event("lazyxla", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert 0 <= start.elapsed_time(end) < 10_000
    plain = torch.Event("lazyxla")
    plain.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        start.elapsed_time(plain)


# --- Random generators ---------------------------------------------------------------------------


def test_generator_draws_seed_and_ordinal():
    generator = torch.Generator("lazyxla").manual_seed(7)
    assert [_C.draw(generator) for _ in range(3)] == [(7, 0), (7, 1), (7, 2)]
    generator.manual_seed(8)
    assert _C.draw(generator) == (8, 0)
    assert generator.initial_seed() == 8


def test_generator_state():
    generator = torch.Generator("lazyxla:1").manual_seed(2**64 - 1)
    _C.draw(generator)
    state = generator.get_state()
    assert (state.dtype, state.device.type, state.numel()) == (torch.uint8, "cpu", 16)
    _C.draw(generator)
    other = torch.Generator("lazyxla")
    other.set_state(state)
    assert _C.draw(other) == (2**64 - 1, 1)
    assert generator.device == torch.device("lazyxla:1")


def test_generator_offset_is_the_ordinal():
    generator = torch.Generator("lazyxla").manual_seed(3)
    generator.set_offset(40)
    assert _C.draw(generator) == (3, 40)
    assert generator.get_offset() == 41


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (torch.zeros(8, dtype=torch.uint8), ValueError, "16 bytes .* got 8"),
        (torch.zeros(16), TypeError, "ByteTensor"),
        (torch.zeros(32, dtype=torch.uint8)[::2], RuntimeError, "contiguous"),
    ],
)
def test_bad_generator_state(state, error, message):
    with pytest.raises(error, match=message):
        torch.Generator("lazyxla").set_state(state)


def test_random_seed():
    generator = torch.Generator("lazyxla")
    assert generator.seed() != generator.seed()
    assert generator.initial_seed() == _C.draw(generator)[0]


@pytest.mark.usefixtures("keep_random_state")
def test_torch_manual_seed_reaches_all_devices():
    torch.manual_seed(11)
    assert [_C.draw(_C.default_generator(i)) for i in range(2)] == [(11, 0), (11, 0)]
    lazyxla.manual_seed(-1)
    assert _C.draw(_C.default_generator(1)) == (2**64 - 1, 0)
    with pytest.raises(RuntimeError, match="64-bit"):
        lazyxla.manual_seed(2**64)


@pytest.mark.usefixtures("keep_random_state")
def test_default_generator_state():
    lazyxla.manual_seed(5)
    state = lazyxla.get_rng_state("lazyxla:1")
    drawn = _C.draw(_C.default_generator(1))
    lazyxla.set_rng_state(state, torch.device("lazyxla:1"))
    assert _C.draw(_C.default_generator(1)) == drawn


@pytest.mark.usefixtures("keep_random_state")
@pytest.mark.filterwarnings("ignore:LAZYXLA reports that you have 2 available devices")
def test_fork_rng():
    torch.manual_seed(1)
    with torch.random.fork_rng(device_type="lazyxla"):
        torch.manual_seed(2)
        _C.draw(_C.default_generator(0))
    assert _C.draw(_C.default_generator(0)) == (1, 0)


def test_threads_draw_distinct_ordinals():
    generator = torch.Generator("lazyxla").manual_seed(0)
    drawn: list[tuple[int, int]] = []

    def body():
        drawn.extend(_C.draw(generator) for _ in range(500))

    threads = [threading.Thread(target=body) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ordinal for _, ordinal in drawn) == list(range(2000))


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
