"""The on-disk store of compiled programs: what a second process finds, and what it must not trust.

Every script runs in a process of its own and prints its counters and what it computed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cache_damage import entry, packed
from tests.conftest import ROOT, RunPython

TELL = """
import json, sys
import lazyxla
counters = lazyxla.counters()
names = ("lowerings", "compiles", "programs_loaded", "executions")
print(json.dumps({"values": values, **{name: counters[name] for name in names}}))
"""

TRAINING = (
    """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.25), torch.nn.Linear(8, 2))
model.to("lazyxla")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
x = torch.ones(3, 4, device="lazyxla")
values = []
for _ in range(4):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    schedule.step()
    values.append(loss.item())
"""
    + TELL
)

ONE = (
    """
import torch
x = torch.arange(6.0).view(2, 3).to("lazyxla")
values = (x @ x.t() * 3).cpu().tolist()
"""
    + TELL
)

Told = dict[str, Any]


class Processes:
    """Runs scripts on one cache directory."""

    def __init__(self, directory: Path, run_python: RunPython) -> None:
        self.directory = directory
        self.run_python = run_python

    def environment(self, **more: str) -> dict[str, str]:
        return {"LAZYXLA_CACHE_DIR": str(self.directory), "LAZYXLA_CACHE_SIZE": "100", **more}

    def run(self, script: str, **more: str) -> Told:
        self.last = self.run_python("import lazyxla\n" + script, **self.environment(**more))
        return json.loads(self.last.stdout.splitlines()[-1])

    def entries(self, kind: str = "") -> list[Path]:
        return sorted((self.directory / "programs").glob(f"{kind}*"))


@pytest.fixture
def processes(tmp_path: Path, run_python: RunPython) -> Processes:
    return Processes(tmp_path / "cache", run_python)


def compiled(told: Told) -> tuple[int, int, int]:
    return told["lowerings"], told["compiles"], told["programs_loaded"]


def test_the_second_process_lowers_and_compiles_nothing(processes: Processes) -> None:
    cold = processes.run(TRAINING)
    assert cold["compiles"] == cold["lowerings"] > 1
    assert cold["programs_loaded"] == 0
    warm = processes.run(TRAINING, LAZYXLA_LOG="info")
    assert compiled(warm) == (0, 0, cold["compiles"])
    # The same random numbers, learning rates and donations.
    assert warm["values"] == cold["values"]
    assert warm["executions"] == cold["executions"]
    assert "operators, compiled before (a new graph" in processes.last.stderr


def test_modes_and_host_calls(processes: Processes) -> None:
    script = (
        """
import torch, lazyxla
lazyxla.eager_mode(True)
a = torch.tensor([[4.0, 1.0], [1.0, 3.0]], device="lazyxla")
values = torch.linalg.svdvals(a + a).cpu().tolist()
"""
        + TELL
    )
    cold, warm = processes.run(script), processes.run(script)
    assert cold["compiles"] == 2
    assert compiled(warm) == (0, 0, 2)
    assert warm["values"] == cold["values"]


def test_strict_mode_does_not_run_a_stored_host_call(
    processes: Processes, run_python: RunPython
) -> None:
    script = (
        """
import torch
values = torch.linalg.svdvals(torch.eye(2, device="lazyxla")).cpu().tolist()
"""
        + TELL
    )
    processes.run(script)
    strict = processes.environment(LAZYXLA_STRICT_HOST_CALLS="1")
    result = run_python("import lazyxla\n" + script, check=False, **strict)
    assert "strict mode (LAZYXLA_STRICT_HOST_CALLS)" in result.stderr


def test_numbers_that_programs_are_compiled_for(processes: Processes) -> None:
    # Where a roll starts is part of the program: two numbers, two programs.
    script = (
        """
import torch
x = torch.arange(4.0, device="lazyxla")
values = [torch.roll(x, n, 0).add(0.5 * n).cpu().tolist() for n in SHIFTS]
"""
        + TELL
    )
    cold = processes.run(script.replace("SHIFTS", "(1, 2)"))
    warm = processes.run(script.replace("SHIFTS", "(1, 2)"))
    assert compiled(warm) == (0, 0, cold["compiles"])
    assert warm["values"] == cold["values"]
    other = processes.run(script.replace("SHIFTS", "(3,)"))
    assert other["values"] == [[2.5, 3.5, 4.5, 1.5]]
    assert other["compiles"] == 1


def test_constants_are_compared(processes: Processes) -> None:
    processes.run(ONE)
    other = processes.run(ONE.replace("* 3", "* 5"))
    assert other["compiles"] == 1
    assert other["values"] == [[25.0, 70.0], [70.0, 250.0]]
    for factor, corner in (("3", 15.0), ("5", 25.0)):
        told = processes.run(ONE.replace("* 3", f"* {factor}"))
        assert compiled(told) == (0, 0, 1)
        assert told["values"][0][0] == corner


def test_a_traced_graph_is_not_mistaken_for_another(processes: Processes) -> None:
    script = (
        """
import torch
from lazyxla.dynamo import backend
f = torch.compile(lambda x: (x.sin() + NUMBER).sum(), backend=backend)
values = f(torch.zeros(3, device="lazyxla")).item()
"""
        + TELL
    )
    for number in (1, 2):
        this = script.replace("NUMBER", str(number))
        for expected in ((1, 1, 0), (0, 0, 1)):
            told = processes.run(this)
            assert compiled(told) == expected
            assert told["values"] == 3.0 * number


def test_a_users_rule_is_not_mistaken_for_another(processes: Processes) -> None:
    script = (
        """
import torch, lazyxla
torch.library.define("store_test::scale", "(Tensor x) -> Tensor")
torch.library.impl("store_test::scale", "Meta")(torch.empty_like)

@lazyxla.lowering.rule("store_test::scale")
def scale(b, x):
    return b.hlo.multiply(x, b.full(b.shape(x), FACTOR, b.dtype(x)))

values = torch.ops.store_test.scale(torch.ones(2, device="lazyxla")).cpu().tolist()
"""
        + TELL
    )
    assert processes.run(script.replace("FACTOR", "2"))["values"] == [2.0, 2.0]
    assert compiled(processes.run(script.replace("FACTOR", "2"))) == (1, 0, 1)
    other = processes.run(script.replace("FACTOR", "3"))
    assert compiled(other) == (1, 1, 0)
    assert other["values"] == [3.0, 3.0]


def truncate(path: Path, content: bytes) -> None:
    path.write_bytes(content[:-10])


def change_a_bit(path: Path, content: bytes) -> None:
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def empty(path: Path, content: bytes) -> None:
    path.write_bytes(b"")


def put_something_else(path: Path, content: bytes) -> None:
    path.write_bytes(b"\x80\x04" + b"something else" * 100)


def give_away(path: Path, content: bytes) -> None:
    if os.geteuid() == 0:  # nobody else can
        os.chown(path, 12345, 12345)
    else:
        path.unlink()


def put_what_does_not_load(path: Path, content: bytes) -> None:
    key, _ = entry(content)
    path.write_bytes(packed(key, b"no executable"))


def test_damaged_entries_are_replaced(processes: Processes) -> None:
    damages = [truncate, change_a_bit, empty, put_something_else, give_away, put_what_does_not_load]
    script = (
        f"""
import torch
ones = [torch.ones(n, device="lazyxla") for n in range(1, {1 + len(damages)})]
values = [x.add(1).cpu().tolist() for x in ones]
"""
        + TELL
    )
    for kind in ("graph", "program"):
        cold = processes.run(script)
        good = {path: path.read_bytes() for path in processes.entries()}
        for damage, path in zip(damages, processes.entries(kind), strict=False):
            damage(path, good[path])
        again = processes.run(script)
        assert again["values"] == cold["values"]
        # A damaged graph is lowered again, and its program found; a damaged program is compiled.
        count = len(damages)
        assert compiled(again) == ((count, 0, count) if kind == "graph" else (count, count, 0))
        assert compiled(processes.run(script)) == (0, 0, count)


def test_another_version_finds_nothing(processes: Processes) -> None:
    processes.run(ONE)
    flags = processes.run(ONE, XLA_FLAGS="--xla_cpu_enable_fast_min_max=false")
    assert compiled(flags) == (1, 1, 0)
    newer = "from lazyxla.cache import program_store as s\ns._lowering_version = lambda: {}\n"
    assert compiled(processes.run(newer + ONE)) == (1, 1, 0)
    precision = "import torch\ntorch.set_float32_matmul_precision('medium')\n"
    assert compiled(processes.run(precision + ONE)) == (1, 1, 0)


def test_a_killed_writer_leaves_nothing_that_counts(processes: Processes) -> None:
    processes.run(ONE)
    directory = processes.directory / "programs"
    written = processes.entries()
    for path in written:
        path.rename(f"{path}.123.1.unfinished")
    old = processes.entries()[0]
    os.utime(old, (time.time() - 7200,) * 2)
    assert compiled(processes.run(ONE)) == (1, 1, 0)
    assert compiled(processes.run(ONE)) == (0, 0, 1)
    left = [path.name for path in directory.iterdir() if path.name.endswith(".unfinished")]
    assert len(left) == len(written) - 1
    assert old.name not in left


def test_a_full_disk_is_told_once(processes: Processes) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    script = ONE.replace("values =", "y = (x + 1).cpu()\nvalues =")
    told = processes.run(limit + script)
    assert compiled(told) == (2, 2, 0)
    assert processes.last.stderr.count("compiled programs cannot be kept in") == 1
    assert "File too large" in processes.last.stderr
    assert "LAZYXLA_CACHE_SIZE=0" in processes.last.stderr
    assert not processes.entries("program")


def test_a_directory_that_cannot_be_written(processes: Processes) -> None:
    processes.run(ONE)
    directory = processes.directory / "programs"
    for parent in (directory, *directory.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    for path in processes.entries():
        path.chmod(0o644)
    directory.chmod(0o555)
    # Root may write anywhere.
    nobody = "import os\nif os.geteuid() == 0:\n    os.seteuid(65534)\n"
    start = "import torch\ntorch.ones(1, device='lazyxla').add(1).cpu()\n"
    told = processes.run(ONE.replace("import torch\n", start + nobody, 1))
    directory.chmod(0o755)
    assert told["programs_loaded"] == 1  # reading goes on
    assert told["values"][0][0] == 15.0


def test_no_directory_and_no_size(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = processes.run(ONE, LAZYXLA_CACHE_DIR=str(tmp_path / "file" / "below"))
    assert compiled(told) == (1, 1, 0)
    processes.run(ONE, LAZYXLA_CACHE_SIZE="0")
    assert not processes.directory.joinpath("programs").exists()


def test_the_least_recently_used_make_room(processes: Processes) -> None:
    processes.run(ONE)
    used = processes.entries()
    others = [processes.directory / "programs" / f"program-{n:040x}" for n in range(4)]
    for n, path in enumerate([*used, *others]):
        if path in others:
            path.write_bytes(bytes(400 << 10))
        os.utime(path, (time.time() - 3600 + n,) * 2)
    # They are found, which makes them the newest; then something new is written.
    script = ONE.replace(TELL, "y = (x + 1).cpu()\n" + TELL)
    assert compiled(processes.run(script, LAZYXLA_CACHE_SIZE="1")) == (1, 1, 1)
    left = processes.entries()
    assert set(used) < set(left)
    assert [path for path in others if path in left] == others[-1:]


def test_processes_at_the_same_time(processes: Processes) -> None:
    running = [
        subprocess.Popen(
            [sys.executable, "-c", "import lazyxla\n" + TRAINING],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **processes.environment()},
        )
        for _ in range(3)
    ]
    told = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in running]
    assert all(t["values"] == told[0]["values"] for t in told)
    after = processes.run(TRAINING)
    assert after["compiles"] == after["lowerings"] == 0
    assert after["values"] == told[0]["values"]


def test_bounds_of_another_width_are_another_program(processes: Processes) -> None:
    script = (
        """
import torch
values = [int(torch.empty(99, dtype=torch.long, device="lazyxla").random_(0, high).max())
          for high in HIGHS]
"""
        + TELL
    )
    narrow = processes.run(script.replace("HIGHS", "(3, 5, 7)"))
    assert max(narrow["values"]) < 7
    wide = processes.run(script.replace("HIGHS", "(2**60, 2**61, 2**62)"))
    assert [value.bit_length() for value in wide["values"]] == [60, 61, 62]
