"""The sweep survives what its workers do, and known failures are checked both ways."""

from __future__ import annotations

import pytest
import torch

from tests.opinfo import expected, sweep
from tests.opinfo.checks import check_entry
from tests.opinfo.expected import Expected, unexpected
from tests.opinfo.outcome import Outcome
from tests.opinfo.report import document
from tests.opinfo.sweep import Worker


def test_worker_survives_crash_and_hang() -> None:
    worker = Worker(timeout=60)
    crashed = worker.check("no such entry", "float32", "forward", 1)
    assert [f["kind"] for f in crashed.failures] == ["crash"]
    assert worker.check("add", "float32", "forward", 1).passed
    worker.timeout = 0.0
    hanging = worker.check("sort", "float32", "forward", None)
    assert [f["kind"] for f in hanging.failures] == ["timeout"]
    worker.stop()


def test_worker_ends_before_its_mappings_do(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(timeout=60)
    assert worker.check("neg", "float32", "forward", 1).passed
    first = worker._process
    assert first is not None
    assert worker.check("neg", "float32", "forward", 1).passed
    assert worker._process is first
    monkeypatch.setattr(sweep, "_MOST_MAPPINGS", 0)
    assert worker.check("neg", "float32", "forward", 1).passed
    assert worker._process is not first
    assert first.poll() is not None
    worker.stop()


def test_known_failures_are_checked_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "EXPECTED", (Expected("it is so", ("add",), ("values",)),))
    outcome = Outcome("add", "float32", "forward", samples=2)
    message = "add forward passes, but is expected to fail: it is so"
    assert unexpected(outcome, complete=True) == [message]
    assert unexpected(outcome, complete=False) == []
    outcome.fail("values", "not close", 1)
    assert unexpected(outcome, complete=True) == []
    outcome.fail("strides", "(1, 2)", 0)
    assert unexpected(outcome, complete=True) == ["add forward sample 0: strides: (1, 2)"]


def test_document_names_what_does_not_pass() -> None:
    good, bad = Outcome("add", "float32", "forward", 2), Outcome("mul", "float32", "forward", 3)
    bad.fail("values", "not close", 1)
    bad.fallbacks = {"aten::mul.Tensor": 1}
    text = document([good, bad])
    assert "| float32 | forward | all samples | 2 | 5 | 1 | 1 | 0 | 0 | 1 |" in text
    assert "| mul | float32 | 1/3: values |" in text
    assert "| add |" not in text


def test_document_says_how_many_samples_were_tried() -> None:
    outcomes = [
        Outcome("add", "bool", "forward", 2, limit=2),
        Outcome("mul", "bool", "forward", 7),
    ]
    text = document(outcomes)
    assert "| bool | forward | the first 2 | 1 | 2 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| bool | forward | all samples | 1 | 7 | 1 | 0 | 0 | 0 | 0 |" in text


def test_worker_notes_the_limit() -> None:
    assert check_entry("abs", torch.float32, "forward", 1).limit == 1
    # Of calls that are errors all are checked, whatever the limit is.
    assert check_entry("abs", torch.float32, "errors", 1).limit is None
