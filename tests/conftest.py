"""Shared by all tests: they run on the CPU plugin, with settings and caches of their own."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch, which imports lazyxla where that is installed.
_KEPT = ("PLATFORM", "CPU_DEVICES", "PLUGIN_PATH", "CREATE_OPTIONS")
for _name in [name for name in os.environ if name.startswith("LAZYXLA_")]:
    if _name.removeprefix("LAZYXLA_") not in _KEPT:
        del os.environ[_name]
os.environ.setdefault("LAZYXLA_PLATFORM", "cpu")
os.environ.setdefault("LAZYXLA_CPU_DEVICES", "2")
os.environ.setdefault("LAZYXLA_CACHE_DIR", tempfile.mkdtemp(prefix="lazyxla-test-"))
# Tests count what is compiled; those of the program store turn it on.
os.environ.setdefault("LAZYXLA_CACHE_SIZE", "0")
# Tests are for the programs that are compiled; test_host_programs.py turns these on.
os.environ.setdefault("LAZYXLA_HOST_PROGRAMS", "0")

import pytest  # noqa: E402
import torch  # noqa: E402

import lazyxla  # noqa: E402
from lazyxla import _C, platforms  # noqa: E402
from lazyxla.lowering import registry  # noqa: E402
from tests import slow  # noqa: E402

# torch.manual_seed notes the seed for each kind of device that may start later, with the formatted
# stack: 5 ms, several times in each of thousands of tests.
for _kind in (torch.cuda, torch.mtia, torch.xpu):
    if not _kind.is_available():
        _kind.manual_seed_all = lambda seed: None

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs",
        type=int,
        default=400,
        help="how many random programs tests/test_random_programs.py runs, and in proportion "
        "tests/spmd/cases_random.py (default: 400)",
    )
    parser.addoption(
        "--overlap-samples",
        type=int,
        default=1,
        help="how many samples of each operator tests/opinfo/test_shared_memory.py tries "
        "(default: 1)",
    )
    parser.addoption(
        "--cache-rounds",
        type=int,
        default=40,
        help="how often tests/test_cache_damage.py damages the cache directory (default: 40)",
    )
    parser.addoption(
        "--every-size",
        action="store_true",
        help="run all cases of tests/test_distributed.py in groups of each size",
    )
    parser.addoption(
        "--faults",
        type=int,
        default=15,
        help="trials that tests/test_distributed_faults.py makes of processes that differ",
    )
    parser.addoption(
        "--exits",
        type=int,
        default=5,
        help="how many processes of each kind tests/test_exit.py ends (default: 5)",
    )
    parser.addoption(
        "--shapes",
        type=int,
        default=1200,
        help="how many shapes tests/test_bounds.py computes with (default: 1200)",
    )
    parser.addoption(
        "--thread-rounds",
        type=int,
        default=10,
        help="how many steps each thread of tests/test_threads.py trains (default: 10)",
    )
    parser.addoption(
        "--steps",
        type=int,
        default=20,
        help="how many random steps tests/test_captured_steps_random.py captures (default: 20)",
    )
    slow.add_options(parser)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow.deselect(config, items)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random data in every run, whatever runs before and in whichever process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def counters_from_zero() -> None:
    """What other tests let the host run is none of a test's fallbacks."""
    if _C.initialized():
        lazyxla.reset_counters()


@pytest.fixture(autouse=True)
def nothing_pending() -> None:
    """What a failed test's traceback keeps alive is no part of another test's program."""
    if _C.initialized():
        with contextlib.suppress(Exception):  # the other test's failure
            lazyxla.sync()


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    """What a test gives operators as rules is gone after it."""
    with registry.temporary():
        yield


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python() -> RunPython:
    """Runs a script in a fresh interpreter: ``run_python(code, LAZYXLA_X="1", check=True)``."""

    def run(
        code: str, check: bool = True, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Builds a plugin of tests/plugins around the CPU's: ``plugin("mapping")``.

    It gives the environment in which a fresh interpreter takes that one.
    """

    def build(name: str) -> dict[str, str]:
        cpu = platforms.plugin_of("cpu")
        assert cpu is not None
        library = tmp_path / f"{name}.so"
        source, header = ROOT / f"tests/plugins/{name}.cpp", Path(cpu).parent / "include"
        options = ["-std=c++17", "-shared", "-fPIC", "-I", str(header), "-ldl"]
        subprocess.run(["c++", str(source), *options, "-o", str(library)], check=True)
        return {"LAZYXLA_PLUGIN_PATH": str(library), "PLUGIN": cpu}

    return build


@pytest.fixture
def keep_random_state() -> Iterator[None]:
    """Puts the CPU's and the devices' default generators back after the test."""
    host, device = torch.get_rng_state(), torch.lazyxla.get_rng_state_all()
    yield
    torch.set_rng_state(host)
    torch.lazyxla.set_rng_state_all(device)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, keep_random_state: None) -> Callable[[str], Any]:
    """Imports an example's module by name; its neighbours are found as when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


@pytest.fixture
def uncut() -> Iterator[None]:
    """Graphs stay whole, for tests that run many from the same lines and count programs."""
    lazyxla.settings.cut_graphs = False
    yield
    lazyxla.settings.cut_graphs = True


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before: all tests that compile an nn.Sequential share its forward's code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the graphs that torch.compile hands over during a test, in their order."""
    from lazyxla import dynamo

    operators: list[str] = []
    compile_graph = dynamo.compile_graph

    def watched(graph: torch.fx.Graph, *args: Any) -> Any:
        operators.extend(str(node.target) for node in graph.nodes if node.op == "call_function")
        return compile_graph(graph, *args)

    monkeypatch.setattr(dynamo, "compile_graph", watched)
    return operators


@pytest.fixture
def modes_stay_as_they_are() -> Iterator[None]:
    """A test leaves no mode and no region behind."""
    yield
    assert lazyxla.eager_mode() is False
    assert not _C.in_region()


@pytest.fixture
def collected() -> Iterator[None]:
    """Nothing runs and no garbage holds memory when a test that counts both begins."""
    gc.collect()
    lazyxla.sync(wait=True)
    yield
    gc.collect()
