"""The runner of PyTorch's tests for many processes, tried on a small file of its own kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.upstream.distributed.__main__ import SPANNING, SUITE
from tests.upstream.distributed.names import rename
from tests.upstream.known import load

pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="this PyTorch was built without torch.distributed"
)

FILE = """
import os, time
import torch
import torch.distributed as dist
from torch.testing._internal.common_cuda import TEST_CUDA
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import TestCase

class TestSmall(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def total(self):
        dist.init_process_group(
            "nccl", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2
        )
        x = torch.ones(3).cuda()
        dist.all_reduce(x)
        return x.sum()

    @skip_if_lt_x_gpu(2)
    def test_right(self):
        assert TEST_CUDA
        self.assertEqual(self.total().item(), 6)

    def test_wrong(self):
        self.assertEqual(self.total().item(), 7)

    @skip_if_lt_x_gpu(8)
    def test_left_out(self):
        self.fail()

    def test_hangs(self):
        time.sleep(600)

class TestAlone(TestCase):
    def test_crashes(self):
        os._exit(3)
"""

THREADED = """
import lazyxla
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_distributed import MultiThreadedTestCase

class TestThreads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_device(self):
        before = lazyxla.counters()["executions"]
        init_device_mesh("cuda", (2,))
        self.assertEqual(torch.cuda.current_device(), 0)
        self.assertEqual(lazyxla.counters()["executions"], before)
"""


def test_every_kind_of_outcome(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "test_small.py").write_text(FILE)
    worker = SUITE.start(tmp_path, "parts/test_small", tmp_path)
    found = {t: worker.run(t, 2 if "hangs" in t else 120) for t in worker.tests}
    worker.stop()
    assert {test: outcome["kind"] for test, outcome in found.items()} == {
        "TestSmall.test_right": "passed",
        "TestSmall.test_wrong": "failed",
        "TestSmall.test_left_out": "skipped",
        "TestSmall.test_hangs": "timeout",
        "TestAlone.test_crashes": "crashed",
    }
    assert "Expected 7 but got 6" in found["TestSmall.test_wrong"]["message"]


def test_threads_share_a_device(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(THREADED)
    worker = SUITE.start(tmp_path, "test_small", tmp_path)
    found = worker.run("TestThreads.test_device", 120)
    worker.stop()
    assert found["kind"] == "passed", found["message"]


SPANNED = """
import lazyxla
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase, skip_if_lt_x_gpu

class TestSmall(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    @skip_if_lt_x_gpu(4)
    def test_devices(self):
        torch.cuda.set_device(self.rank)
        dist.init_process_group(
            "nccl", init_method=f"file://{self.file_name}", rank=self.rank, world_size=2
        )
        x = torch.ones(3, device=f"cuda:{self.rank}")
        dist.all_reduce(x)
        self.assertEqual(x.sum().item(), 6)
        self.assertEqual(lazyxla.counters()["host_calls"], 0)
        self.assertEqual((lazyxla.device_count(), lazyxla.global_device_count()), (1, 2))
"""


def test_processes_that_share_a_client(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(SPANNED)
    worker = SPANNING.start(tmp_path, "test_small", tmp_path)
    found = worker.run("TestSmall.test_devices", 120)
    worker.stop()
    assert found["kind"] == "passed", found["message"]


def test_names_of_the_device() -> None:
    text = 'x.cuda(); torch.cuda.set_device(0); "cuda:0"; "cpu:gloo,cuda:nccl"; TEST_CUDA'
    ours = (
        "x.lazyxla(); torch.lazyxla.set_device(0); "
        '"lazyxla:0"; "cpu:gloo,lazyxla:lazyxla"; TEST_DEVICE'
    )
    assert rename(text, "lazyxla") == ours
    assert '"cpu:gloo,cpu:gloo"' in rename(text, "cpu")
    of_rank = (
        'x.cuda(self.rank); f"cuda:{rank}"; f"{device}:{self.rank}"; torch.cuda.device_count()'
    )
    own = 'x.lazyxla(0); f"lazyxla:0"; f"{device}:0"; 4'
    assert rename(of_rank, "lazyxla", own_device=True) == own
    kept = "import torch.cuda.nccl; torch.backends.cuda.matmul; torch.version.cuda; common_cuda"
    assert rename(kept, "lazyxla") == kept


def test_known_failures_are_of_the_suite() -> None:
    known = load(SUITE.known_failures)
    assert len(set(known)) == len(known)
    assert all(k.reason and k.file in SUITE.files for k in known)
