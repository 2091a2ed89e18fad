"""What meta functions answer is kept on disk, and a bad file is never worse than none."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lazyxla
from lazyxla.cache import shape_store
from tests.support import run_all

RunPython = Callable[..., Any]

SCRIPT = """
import torch, lazyxla
x = torch.ones(3, 4, device="lazyxla")
y = (x.t() @ x).softmax(0).add_(1).sum(dim=1)
torch.add(x, 1, out=torch.empty(0, device="lazyxla"))
print([round(v, 4) for v in y.tolist()], lazyxla.counters()["shape_inferences"])
"""
EXPECTED = "[5.0, 5.0, 5.0, 5.0]"


def _run(run_python: RunPython, directory: Path) -> int:
    """Runs the script; returns how often it asked a meta function."""
    printed = run_python(SCRIPT, LAZYXLA_CACHE_DIR=str(directory)).stdout
    match = re.fullmatch(r"(\[.*\]) (\d+)\n", printed)
    assert match, printed
    assert match[1] == EXPECTED
    return int(match[2])


def _file(directory: Path) -> Path:
    (file,) = directory.glob("shapes-*.bin")
    return file


def test_second_process_asks_nothing(run_python: RunPython, tmp_path: Path) -> None:
    assert _run(run_python, tmp_path / "cache") > 3
    assert _run(run_python, tmp_path / "cache") == 0
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert _file(tmp_path / "cache").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", ["truncated", "garbage", "flipped", "empty"])
def test_damaged_file_is_asked_anew(run_python: RunPython, tmp_path: Path, damage: str) -> None:
    asked = _run(run_python, tmp_path)
    content = bytearray(_file(tmp_path).read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    elif damage == "garbage":
        content = bytearray(os.urandom(500))
    elif damage == "flipped":
        content[len(content) // 2] ^= 0xFF
    else:
        content.clear()
    _file(tmp_path).write_bytes(content)
    assert 0 < _run(run_python, tmp_path) <= asked
    assert _run(run_python, tmp_path) == 0  # the file is whole again


def test_threads_share_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some add while others write; nothing fails, and what is read is what was added."""
    monkeypatch.setattr(shape_store, "_WRITE_AT_BYTES", 100)
    path = str(tmp_path / "shapes-threads.bin")
    store = shape_store.ShapeStore(path)

    def add(thread: int) -> None:
        for i in range(300):
            key = f"{thread} {i}".encode()
            store.add(key, key[::-1])
            assert store.find(key) == key[::-1]

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run_all([functools.partial(add, thread) for thread in range(4)])
    finally:
        sys.setswitchinterval(before)
    store.flush()
    again = shape_store.ShapeStore(path)
    keys = [f"{thread} {i}".encode() for thread in range(4) for i in range(300)]
    found = [again.find(key) for key in keys]
    assert all(answer in (None, key[::-1]) for answer, key in zip(found, keys, strict=True))
    assert sum(answer is not None for answer in found) > len(keys) / 2


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "shapes-bounded.bin")
    store = shape_store.ShapeStore(path)
    for i in range(100):
        store.add(b"%d" % i, b"answer")
    store.flush()
    monkeypatch.setattr(lazyxla.settings, "max_calls", 8)
    again = shape_store.ShapeStore(path)
    for full in (store, again):
        full.add(b"one more", b"answer")
        assert full.find(b"one more") == b"answer"
    assert sum(again.find(b"%d" % i) is not None for i in range(100)) < 8
    assert again.find(b"99") == b"answer"


def test_directory_that_cannot_be_made(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert _run(run_python, tmp_path / "file" / "cache") > 3
