"""Where the caches lie: what cannot be written, what others can write to, and full disks."""

from __future__ import annotations

import importlib
import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazyxla
from lazyxla import aot
from lazyxla.aot.__main__ import main
from lazyxla.cache import entries
from tests.conftest import ROOT
from tests.support import counted

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture(autouse=True)
def keep_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = lazyxla.settings.cache_dir, lazyxla.settings.cache_size
    lazyxla.settings.cache_size = 100
    yield
    lazyxla.settings.cache_dir, lazyxla.settings.cache_size = before


_columns = iter(range(9000, 9999))  # of graphs that are new to this process


def told_of_new_graphs(count: int = 3) -> list[str]:
    """Runs some; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            x = torch.linspace(0, 1, next(_columns))
            torch.testing.assert_close(x.to("lazyxla").square().cpu(), x.square())
    return [str(warning.message) for warning in caught if "lazyxla" in str(warning.message)]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("below", "reason"),
    [
        ("/proc/lazyxla", "No such file or directory"),
        ("/proc/self/lazyxla", "No such file or directory"),
        ("/dev/null", "Not a directory"),
        ("/dev/null/lazyxla", "Not a directory"),
        ("{tmp}/file", "Not a directory"),
        ("{tmp}/file/deep/below", "Not a directory"),
        ("{tmp}/" + "n" * 300, "File name too long"),
        ("{tmp}/loop", "Too many levels of symbolic links"),
    ],
)
def test_a_directory_that_cannot_be_made(tmp_path: Path, below: str, reason: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "loop").symlink_to("loop")
    directory = below.format(tmp=tmp_path)
    lazyxla.settings.cache_dir = directory
    with counted() as n:
        (told,) = told_of_new_graphs()
    assert f"compiled programs cannot be kept in {directory}: {reason}. " in told
    assert "set LAZYXLA_CACHE_DIR to a directory that can be written" in told
    assert n.compiles == 3
    assert told_of_new_graphs() == []


@pytest.mark.parametrize("sub", ["", "programs"])
@pytest.mark.parametrize("mode_", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_to(tmp_path: Path, sub: str, mode_: int) -> None:
    (tmp_path / "programs").mkdir(mode=0o700)
    directory = tmp_path / sub
    directory.chmod(mode_)
    lazyxla.settings.cache_dir = str(tmp_path)
    (told,) = told_of_new_graphs()
    path = str(directory).rstrip("/")
    assert f"{path} is not used: other users may write to it, its mode is {mode_:o}" in told
    assert "chmod go-w" in told
    assert "LAZYXLA_CACHE_DIR" in told
    assert not list((tmp_path / "programs").iterdir())
    with pytest.raises(PermissionError, match="other users may write to it"):
        aot.compile(torch.exp, (torch.ones(2),), store=tmp_path)


@needs_root
def test_a_directory_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    lazyxla.settings.cache_dir = str(tmp_path)
    (told,) = told_of_new_graphs()
    assert f"{tmp_path} is not used: it belongs to another user, number 12345" in told
    assert not list(tmp_path.iterdir())


def test_a_sticky_directory_is_used(tmp_path: Path) -> None:
    """As /tmp is: others may write there, but not change what is ours."""
    tmp_path.chmod(0o1777)
    lazyxla.settings.cache_dir = str(tmp_path)
    assert told_of_new_graphs() == []
    assert len(list((tmp_path / "programs").glob("program-*"))) == 3


def test_a_file_that_others_can_write_to_is_told_of_once(tmp_path: Path) -> None:
    lazyxla.settings.cache_dir = str(tmp_path)
    x = torch.ones(next(_columns)).to("lazyxla")
    graph = _stored_graph(tmp_path, x)
    graph.chmod(0o666)
    with pytest.warns(UserWarning, match=f"{graph.name} is not used: other users may write to it"):
        torch.testing.assert_close((x - 3).cpu(), x.cpu() - 3)
    assert mode(graph) == 0o600  # it was written anew


def _stored_graph(cache: Path, x: torch.Tensor) -> Path:
    """The entry of x - 3, which this process has not run."""
    with aot.capture() as programs:
        y = x - 3
        lazyxla.sync()
    programs[0].store()
    del y
    (graph,) = (cache / "programs").glob("graph-*")
    return graph


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    lazyxla.settings.cache_dir = str(tmp_path)
    x = torch.ones(next(_columns)).to("lazyxla")
    graph = _stored_graph(tmp_path, x)
    graph.unlink()
    os.mkfifo(graph)  # to open it would wait for a writer
    with pytest.warns(UserWarning, match=f"{graph.name} is no file"):
        torch.testing.assert_close((x - 3).cpu(), x.cpu() - 3)
    assert graph.is_fifo()


def test_making_room_spares_what_is_not_the_caches(tmp_path: Path) -> None:
    lazyxla.settings.cache_dir, lazyxla.settings.cache_size = str(tmp_path), 1
    programs = tmp_path / "programs"
    programs.mkdir(mode=0o700)
    theirs = [programs / name for name in ("thesis.tex", "program-1", "graph-" + "0" * 39 + "g")]
    for path in theirs:
        path.write_bytes(bytes(2 << 20))
    old = programs / ("program-" + "0" * 40)
    old.write_bytes(bytes(2 << 20))
    assert told_of_new_graphs(1) == []
    assert not old.exists()
    assert all(path.stat().st_size == 2 << 20 for path in theirs)


def test_the_command_makes_private_directories(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text(
        "import torch\n\n"
        "def make():\n    x = torch.ones(2).to('lazyxla')\n    return lambda: x.neg()\n"
    )
    cache = tmp_path / "a" / "b" / "c"
    umask = os.umask(0o002)
    try:
        assert main([f"{script}:make", "--steps", "1", "--cache-dir", str(cache)]) == 0
    finally:
        os.umask(umask)
    made = [tmp_path / "a", tmp_path / "a/b", cache, cache / "programs"]
    assert [mode(path) for path in made] == [0o700] * 4
    assert {mode(path) for path in (cache / "programs").iterdir()} == {0o600}


# --- Disks that are full, or that cannot be written ----------------------------------------------

# Trains on each of the directories in turn, and tells what it took, and which files are there.
TRAIN = """
import json, os, sys, torch, lazyxla
settings = lazyxla.settings
found = []
for directory in sys.argv[1:]:
    settings.cache_dir, settings.max_programs = directory, 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model.to("lazyxla")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    lazyxla.reset_counters()
    losses = []
    for size in (3, 4, 5, 3, 4, 5, 3):
        loss = model(torch.ones(size, 8, device="lazyxla")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    programs = os.path.join(directory, "programs")
    names = os.listdir(programs) if os.path.isdir(programs) else []
    counters = {name: lazyxla.counters()[name] for name in ("compiles", "programs_loaded")}
    found.append({"losses": losses, "names": names, **counters})
print(json.dumps(found))
"""

MOUNT = """
set -e
mkdir {root}/full {root}/readonly {root}/good
mount -t tmpfs -o size=160k,mode=700 tmpfs {root}/full
mount -t tmpfs -o ro,size=160k,mode=700 tmpfs {root}/readonly
exec {python} -c "$TRAIN" {root}/full {root}/readonly {root}/full {root}/good
"""


def _can_mount() -> bool:
    probe = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=4k tmpfs /mnt"]
    try:
        return subprocess.run(probe, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _can_mount(), reason="this user cannot mount a file system")
def test_training_goes_on_where_nothing_can_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    result = subprocess.run(
        ["unshare", "-m", "sh", "-c", MOUNT.format(root=tmp_path, python=sys.executable)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LAZYXLA_CACHE_SIZE": "100", "TRAIN": TRAIN},
    )
    assert result.returncode == 0, result.stderr
    full, readonly, again, good = json.loads(result.stdout)
    assert full["losses"] == readonly["losses"] == again["losses"] == good["losses"]
    for name, reason in (("full", "No space left on device"), ("readonly", "Read-only file")):
        told = f"compiled programs cannot be kept in {tmp_path}/{name}"
        assert result.stderr.count(told) == 1, result.stderr
        (line,) = (line for line in result.stderr.splitlines() if told in line)
        assert reason in line
    # Some programs had room; what is there is whole, and found again.
    assert any(name.startswith("program-") for name in full["names"])
    assert not [name for name in full["names"] if name.endswith(".unfinished")]
    assert readonly["names"] == []
    assert readonly["programs_loaded"] == 0
    assert again["programs_loaded"] > 0
    assert again["compiles"] > 0
    assert good["compiles"] < readonly["compiles"]


def test_processes_of_the_same_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that share a directory: one was killed as it wrote what another writes."""

    class KilledError(BaseException):
        pass

    def kill(*_: object) -> None:
        raise KilledError

    key = entries.key("program", b"key")
    with monkeypatch.context() as killed:
        killed.setattr(os, "rename", kill)
        killed.setattr(os, "unlink", lambda _: None)
        with pytest.raises(KilledError):
            entries.Entries(str(tmp_path), 1000).write(key, b"half")
    importlib.reload(entries)  # another process begins like the first
    other = entries.Entries(str(tmp_path), 1000)
    other.write(key, b"whole")
    assert other.read(key) == b"whole"
