"""The runner of PyTorch's tests, tried on a small file of its own kind: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

from tests.upstream.known import Known, Outcome, load, problems, summary
from tests.upstream.process import Worker

FILE = """
import os, time, unittest
import torch
from torch.testing._internal.common_cuda import tf32_is_not_fp32  # PyTorch 2.13 has it no more
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase

class TestSmall(TestCase):
    @dtypes(torch.float32, torch.int64)
    def test_right(self, device, dtype):
        self.assertEqual(torch.ones(3, device=device, dtype=dtype).sum(), 3)

    def test_wrong(self, device):
        print("tests may print")
        self.assertEqual(torch.ones(3, device=device).sum(), 4)

    def test_left_out(self, device):
        raise unittest.SkipTest("no reason")

    def test_hangs(self, device):
        time.sleep(600)

    def test_z_crashes(self, device):
        os._exit(3)

class TestNothing(TestCase):
    def test_of_no_device(self):
        self.fail()

instantiate_device_type_tests(TestSmall, globals())
"""


def test_every_kind_of_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_small.py").write_text(FILE)
    worker = Worker(tmp_path, "test_small", tmp_path)
    found = {}
    for test in worker.tests:
        timeout = 1 if "hangs" in test else 120
        found[test] = Outcome("test_small", test, **worker.run(test, timeout))
    worker.stop()
    assert {test: outcome.kind for test, outcome in found.items()} == {
        "TestSmall.test_right_lazyxla_float32": "passed",
        "TestSmall.test_right_lazyxla_int64": "passed",
        "TestSmall.test_wrong_lazyxla": "failed",
        "TestSmall.test_left_out_lazyxla": "skipped",
        "TestSmall.test_hangs_lazyxla": "timeout",
        "TestSmall.test_z_crashes_lazyxla": "crashed",
    }
    assert "Expected 4" in found["TestSmall.test_wrong_lazyxla"].message


OUTCOMES = [
    Outcome("test_a", "T.test_fine", "passed"),
    Outcome("test_a", "T.test_bad_float32", "failed", "Traceback\nAssertionError: no"),
    Outcome("test_a", "T.test_bad_float64", "crashed"),
    Outcome("test_a", "T.test_long", "timeout"),
    Outcome("test_a", "T.test_absent", "skipped"),
]


def _known(pattern: str, reason: str = "a reason", file: str = "test_a") -> Known:
    return Known(reason, file, pattern)


def test_known_failures_are_compared_as_a_set() -> None:
    exact = [_known("T.test_bad_*"), _known("T.test_long")]
    assert problems(OUTCOMES, exact, complete=True) == []
    assert problems(OUTCOMES, exact[:1], complete=True) == ["timeout: test_a T.test_long: "]
    (new,) = problems(OUTCOMES, [*exact[1:], _known("*_float64")], complete=True)
    assert new == "failed: test_a T.test_bad_float32: AssertionError: no"
    (passes,) = problems(OUTCOMES, [*exact, _known("T.test_fine")], complete=True)
    assert passes == "passes, though a known failure: test_a T.test_fine"


def test_a_pattern_without_a_test_is_a_problem_of_complete_runs() -> None:
    for none in ("T.test_gone", "T.test_absent"):
        known = [_known("T.test_bad_*"), _known("T.test_long"), _known(none)]
        assert problems(OUTCOMES, known, complete=False) == []
        assert problems(OUTCOMES, known, complete=True) == [f"no test runs: test_a {none}"]
    elsewhere = [*known[:2], _known("T.test_gone", file="test_b")]
    assert problems(OUTCOMES, elsewhere, complete=True) == []


def test_slow_tests_may_pass_but_not_fail() -> None:
    known = [_known("T.test_bad_float64"), _known("T.test_[flb]*[e32g]", reason="slow: many")]
    (failed,) = problems(OUTCOMES, known, complete=True)
    assert failed == "failed, though known to be only slow: test_a T.test_bad_float32"


def test_known_failures_can_be_read() -> None:
    known = load()
    assert len(set(known)) == len(known)
    assert all(k.reason and k.file.startswith("test_") for k in known)


def test_summary_counts_by_file_and_reason() -> None:
    text = summary(OUTCOMES, [_known("T.test_bad_*")])
    assert "| test_a | 4 | 1 | 1 | 1 | 1 | 2 | 1 |" in text
    assert "| a reason | 2 |" in text
