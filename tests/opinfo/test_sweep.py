"""The sweep survives what its workers do, and known failures are checked both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from tests import worker_process
from tests.opinfo import expected
from tests.opinfo.checks import check_entry
from tests.opinfo.entries import entries, samples
from tests.opinfo.expected import Expected, unexpected
from tests.opinfo.outcome import Outcome
from tests.opinfo.report import document
from tests.opinfo.sweep import Worker, check_all, load


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
    first = worker._process.pid
    assert first is not None
    assert worker.check("neg", "float32", "forward", 1).passed
    assert worker._process.pid == first
    monkeypatch.setattr(worker_process, "_MOST_MAPPINGS", 0)
    assert worker.check("neg", "float32", "forward", 1).passed
    assert worker._process.pid != first
    assert not Path(f"/proc/{first}").exists()
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


def test_several_entries_at_a_time() -> None:
    todo = [(name, "float32", "forward") for name in ("abs", "neg", "sign")]
    outcomes = list(check_all(todo, jobs=2, timeout=120, limit=2))
    assert [(o.entry, o.limit) for o in outcomes] == [("abs", 2), ("neg", 2), ("sign", 2)]
    assert all(o.passed and o.samples for o in outcomes)


def test_document_keeps_what_a_page_says_of_other_parts() -> None:
    page = document(
        [
            _failed("add", "forward"),
            _failed("mul", "forward"),
            _failed("mul", "backward", limit=2),
            _failed("mul", "errors", host="aten::mul.Tensor"),
        ]
    )
    good, bad = Outcome("mul", "float32", "forward", 3), _failed("sub", "backward", "aten::sub")
    assert document([], page) == page
    text = document([good, bad], page)
    assert "| float32 | forward | all samples | 1 | 3 | 1 | 0 | 0 | 0 | 0 |" in text
    assert "| float32 | backward | all samples | 1 | 2 | 0 | 1 | 0 | 0 | 1 |" in text
    assert "| float32 | errors | all samples | 1 | 2 | 0 | 1 | 0 | 0 | 1 |" in text
    assert "the first 2" not in text
    assert "| add |" not in text
    assert "| mul | float32 | pass |  |  |  | 1/2: values |  | `aten::mul.Tensor` |" in text
    assert "| sub | float32 |  | 1/2: values |  |  |  |  | `aten::sub` |" in text
    assert "| `aten::sub` | 1 |" in text
    assert text == document([good, bad], text)


def _failed(entry: str, part: str, host: str = "", limit: int | None = None) -> Outcome:
    outcome = Outcome(entry, "float32", part, 2, limit=limit)
    outcome.fail("values", "not close", 1)
    outcome.fallbacks = {host: 1} if host else {}
    return outcome


def test_documents_are_made_of_several_files(tmp_path: Path) -> None:
    files = [tmp_path / "1.jsonl", tmp_path / "2.jsonl", tmp_path / "none.jsonl"]
    outcomes = [_failed("add", "forward"), _failed("sub", "forward")]
    files[0].write_text("".join(json.dumps(o.as_json()) + "\n" for o in outcomes))
    files[1].write_text(json.dumps(Outcome("add", "float32", "forward", 7).as_json()))
    assert [(o.entry, o.passed) for o in load(*files)] == [("add", True), ("sub", False)]


def test_worker_notes_the_limit() -> None:
    assert check_entry("abs", torch.float32, "forward", 1).limit == 1
    # Of calls that are errors all are checked, whatever the limit is.
    assert check_entry("abs", torch.float32, "errors", 1).limit is None


def test_samples_stay_as_they_were_made() -> None:
    op = entries()["masked.mean"]
    kept = [sample.input for sample in list(samples(op, torch.float32, None))]
    torch.manual_seed(0)
    made = [sample.input.clone() for sample in op.sample_inputs("cpu", torch.float32)]
    assert sum(bool(x.isinf().any()) for x in made) > 0
    assert len(kept) == len(made)
    for x, y in zip(kept, made):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def _views(device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[SampleInput]:
    """Every second element of one tensor, which is filled with another number for each sample."""
    x = torch.empty(7, device=device, dtype=dtype)
    for value in (1.0, 2.0):
        x.fill_(value)
        yield SampleInput(x[1::2].requires_grad_(requires_grad), args=([x[:2]],))


@pytest.mark.parametrize("gradients", [False, True])
def test_samples_keep_what_lies_around_them(gradients: bool) -> None:
    op: Any = SimpleNamespace(name="views", sample_inputs=_views)
    for value, sample in enumerate(list(samples(op, torch.float32, None, gradients)), 1):
        x = sample.input
        assert x.tolist() == [value] * 3
        assert (x.stride(), x.storage_offset(), x.untyped_storage().nbytes()) == ((2,), 1, 28)
        assert (x.requires_grad, x.is_leaf) == (gradients, True)
        assert sample.args[0][0].tolist() == [value] * 2
