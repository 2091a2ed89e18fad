"""Programs that are compiled without being run, and found by whoever runs them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazyxla
from lazyxla import aot
from lazyxla.aot.__main__ import main
from lazyxla.cache import program_store
from tests.conftest import ROOT
from tests.support import needs_cuda, needs_libtpu
from tests.warm_steps import KINDS

SCRIPT = """
import torch

def make_step():
    weight = torch.nn.Linear(8, 8).to("lazyxla")
    return torch.no_grad()(weight), torch.ones(2, 8).to("lazyxla")

def make_nothing():
    return lambda: None

not_a_function = 3

def returns_a_number():
    return 3

if __name__ == "__main__":
    import lazyxla
    torch.manual_seed(0)
    step, x = make_step()
    y = step(x)
    lazyxla.sync(wait=True)
    print(lazyxla.counters())
"""


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LAZYXLA_CACHE_SIZE": "100", **environment},
    )
    assert result.returncode == 0, result.stderr
    return result


def _counted(action: Callable[[], Any]) -> tuple[int, int, int]:
    """What was lowered, compiled and loaded meanwhile."""
    names = ("lowerings", "compiles", "programs_loaded")
    before = lazyxla.counters()
    action()
    after = lazyxla.counters()
    return tuple(after[name] - before[name] for name in names)  # type: ignore[return-value]


def _entries(cache: Path, kind: str = "") -> list[Path]:
    return sorted((cache / "programs").glob(f"{kind}*"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process's cache directory, an empty one."""
    before = lazyxla.settings.cache_dir, lazyxla.settings.cache_size
    lazyxla.settings.cache_dir, lazyxla.settings.cache_size = str(tmp_path / "cache"), 100
    yield tmp_path / "cache"
    lazyxla.settings.cache_dir, lazyxla.settings.cache_size = before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process compiles, another one runs, from a copy of what the first has kept."""
    here, there = tmp_path_factory.mktemp("here"), tmp_path_factory.mktemp("there") / "copy"
    script = str(ROOT / "tests" / "warm_steps.py")
    stored = json.loads(_python(script, "store", LAZYXLA_CACHE_DIR=str(here)).stdout)
    assert (here / "programs").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in _entries(here)} == {0o600}
    shutil.copytree(here, there)
    shutil.rmtree(here)
    ran = json.loads(_python(script, "run", LAZYXLA_CACHE_DIR=str(there)).stdout)
    return {"stored": stored, "ran": ran}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_compiles_nothing(run: dict[str, Any], kind: str) -> None:
    lowerings, compiles, loaded, executions = (list(c) for c in zip(*run["ran"][kind]))
    assert not any(compiles)
    assert not any(lowerings)
    # Each was captured, and is needed: the first step differs from the second, and so on.
    assert sum(loaded) == run["stored"][kind]
    assert loaded[0] > 0
    assert all(executions)


NUMBERS = """
import torch, lazyxla
from lazyxla import aot

x = torch.arange(1.0, 8.0).to("lazyxla")

def work():
    results = []
    for shift, factor in ((1, 2.5), (2, 2.5), (3, 2.5), (3, 3.5), (3, 4.5)):
        results.append(torch.roll(x, shift, 0) * factor)
        lazyxla.sync()
    return results

with aot.capture() as programs:
    work()
for program in programs:
    program.store()
lazyxla.reset_counters()
result = work()[-1].cpu()
n = lazyxla.counters()
assert torch.equal(result, torch.arange(1.0, 8.0).roll(3) * 4.5)
print(n["lowerings"], n["compiles"], n["programs_loaded"] - len(programs))
"""


def test_numbers_are_inputs_or_constants_as_in_a_run(
    run_python: Callable[..., Any], tmp_path: Path
) -> None:
    """In a process where nothing ran before, so that no number is known to vary."""
    result = run_python(NUMBERS, LAZYXLA_CACHE_DIR=str(tmp_path), LAZYXLA_CACHE_SIZE="100")
    assert result.stdout.split() == ["0", "0", "0"]


def test_what_ran_before_does_not_matter(cache: Path) -> None:
    """Which numbers are presumed to vary depends on it (csrc/program/scalars.h)."""
    x = torch.ones(9).to("lazyxla")
    with aot.capture() as programs:
        y = x * 6.5 - 1
        lazyxla.sync()
    (program,) = programs
    program.store()
    # The same operator with another number, in another program.
    z = (x * 7.5).exp()
    lazyxla.sync()
    y = x * 6.5 - 1
    assert _counted(lazyxla.sync) == (0, 0, 1)
    torch.testing.assert_close(y.cpu(), torch.full((9,), 5.5))
    del z


def test_other_numbers_are_a_miss_with_a_reason(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(15).to("lazyxla")
    with aot.capture() as programs:
        y = x.sigmoid() * 2.5
        lazyxla.sync()
    programs[0].store()
    caplog.set_level(logging.INFO, "lazyxla")
    y = x.sigmoid() * 3.5
    assert _counted(lazyxla.sync) == (1, 1, 0)
    torch.testing.assert_close(y.cpu(), torch.ones(15).sigmoid() * 3.5)
    assert f"; it is kept in {cache}/programs for other numbers), lowered in" in caplog.text


def test_compile_keeps_all_programs_of_a_training_step(tmp_path: Path, cache: Path) -> None:
    def training(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    model, x = nn.Linear(11, 3), torch.ones(2, 11)
    elsewhere = tmp_path / "elsewhere"
    compiled = aot.compile(model, (x,), train_step=training, store=elsewhere)
    assert compiled.num_outputs == 7
    assert "1 x cpu" in str(compiled) or "2 x cpu" in str(compiled)
    assert len(_entries(elsewhere, "graph")) == 3  # the step, and the state of two shapes
    lazyxla.settings.cache_dir = str(elsewhere)
    model, x = model.to("lazyxla"), x.to("lazyxla")
    step = training(model)
    for expected in (1, 0, 0):
        loss = step(x)
        assert _counted(lazyxla.sync) == (0, 0, expected)
    assert loss.item() > 0


def test_eager_mode_runs_nothing_in_a_capture(cache: Path) -> None:
    x = torch.ones(5, device="lazyxla")
    with lazyxla.eager_mode(True):
        x * 3
        before = lazyxla.counters()["executions"]
        with aot.capture() as programs:
            x * 3
        assert lazyxla.counters()["executions"] == before
    assert len(programs) == 1


def test_another_version_is_a_miss_with_a_reason(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.full((13,), 2.0).to("lazyxla")
    with aot.capture() as programs:
        y = x.cos().sin()
        lazyxla.sync()
    programs[0].store()
    newer = {**program_store._lowering_version(), "lowering": "x", "torch": "9.9"}
    monkeypatch.setattr(program_store, "_lowering_version", lambda: newer)
    program_store.forget()
    caplog.set_level(logging.INFO, "lazyxla")
    y = x.cos().sin()
    assert _counted(lazyxla.sync) == (1, 1, 0)
    torch.testing.assert_close(y.cpu(), torch.full((13,), 2.0).cos().sin())
    version = torch.__version__.partition("+")[0]
    assert f"; it is kept in {cache}/programs for another environment: lowering " in caplog.text
    assert f", torch {version} instead of 9.9)" in caplog.text


@pytest.mark.parametrize(
    ("version", "public"),
    [
        ("2.13.0+cpu", "2.13.0"),
        ("2.13.0+cu130", "2.13.0"),
        ("2.13.0", "2.13.0"),
        ("2.14.0a0+gitabcdef0", "2.14.0a0+gitabcdef0"),
    ],
)
def test_torchs_wheels_of_one_version_count_as_one(version: str, public: str) -> None:
    assert program_store._public_version(version) == public


def test_what_does_not_load_is_compiled_with_a_reason(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.full((17,), 2.0).to("lazyxla")
    with aot.capture() as programs:
        y = x.tan()
        lazyxla.sync()
    programs[0].store()
    (path,) = _entries(cache, "program-")
    from tests.test_program_store import put_what_does_not_load

    put_what_does_not_load(path, path.read_bytes())
    caplog.set_level(logging.INFO, "lazyxla")
    y = x.tan()
    assert _counted(lazyxla.sync) == (1, 1, 0)
    assert "; what is kept on disk does not load: " in caplog.text
    torch.testing.assert_close(y.cpu(), torch.full((17,), 2.0).tan())


def test_nothing_can_be_kept(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file/below"):
        aot.compile(torch.exp, (torch.ones(2),), store=tmp_path / "file" / "below")
    lazyxla.settings.cache_size = 0
    with pytest.raises(ValueError, match=r"LAZYXLA_CACHE_SIZE .setting cache_size. is 0"):
        aot.compile(torch.exp, (torch.ones(2),), store=True)


@needs_libtpu
def test_programs_for_tpus(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.full((19,), 2.0).to("lazyxla")
    for topology in ("v5e:2x2", "v5e:1x1"):
        with aot.capture(topology) as programs:
            y = x.sinh()
            lazyxla.sync()
        programs[0].store()
    # How many chips there are is none of a program's: the second is the first again.
    assert [len(_entries(cache, kind)) for kind in ("environment", "graph", "program")] == [1] * 3
    text = _entries(cache, "environment")[0].read_text()
    assert "\ndevice: TPU v5 lite\nplatform version: TFRT TPU v5 lite Built on " in text
    assert "instruction sets" not in text
    caplog.set_level(logging.INFO, "lazyxla")
    y = x.sinh()
    assert _counted(lazyxla.sync) == (1, 1, 0)
    torch.testing.assert_close(y.cpu(), torch.full((19,), 2.0).sinh())
    # The graph itself is there: for a TPU.
    assert "it is kept in" in caplog.text
    assert "environment: platform tpu instead of cpu, device TPU v5 lite instead" in caplog.text
    assert ", instruction sets none instead of " in caplog.text


@needs_libtpu
def test_a_cache_for_other_machines_only_is_told_once(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    aot.compile(torch.exp, (torch.ones(2),), topology="v5e:2x2", store=True)
    caplog.set_level(logging.INFO, "lazyxla")
    x = torch.ones(23).to("lazyxla").add(1)
    lazyxla.sync()
    assert f"; all programs are in {cache}/programs for another environment: " in caplog.text
    caplog.clear()
    y = x.log()
    lazyxla.sync()
    assert "compiling 1 operators" in caplog.text
    assert "environment" not in caplog.text
    del y


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command(script: str, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    told = _python("-m", "lazyxla.aot", f"{script}:make_step", "--cache-dir", cache).stdout
    assert told.startswith("1 programs for Topology('this process', 2 x cpu)\n")
    assert "1: 1 operators, recorded 3 times\nProgram for one device of " in told
    assert told.endswith(f"kept in {cache}\n")
    counters = _python(script, LAZYXLA_CACHE_DIR=cache).stdout
    assert "'compiles': 0," in counters
    assert "'programs_loaded': 1," in counters


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param("v5e:2x2", "4 x TPU v5 lite", marks=needs_libtpu),
        pytest.param("h100", "1 x NVIDIA H100 80GB HBM3", marks=needs_cuda),
    ],
)
def test_the_command_for_others(name: str, devices: str, script: str, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    arguments = (f"{script}:make_step", "--topology", name, "--cache-dir", str(cache))
    told = _python("-m", "lazyxla.aot", *arguments, "--steps", "1").stdout
    assert told.startswith(f"1 programs for Topology('{name}', {devices})\n")
    assert "1: 1 operators, recorded once\n" in told
    assert ": fits\n" in told
    assert [len(_entries(cache, kind)) for kind in ("environment", "graph", "program")] == [1] * 3


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("{script}", [], "the target is written script.py:function, not"),
        ("none.py:f", [], "there is no script none.py"),
        ("{script}:none", [], "train.py has no function 'none'"),
        ("{script}:not_a_function", [], "train.py has no function 'not_a_function'"),
        ("{script}:returns_a_number", [], "returns int: it is to return the step, a function, or"),
        ("{script}:make_nothing", [], "records nothing: its step does nothing on the device"),
        ("{script}:make_step", ["--steps", "0"], "argument --steps: at least one step is recorded"),
        pytest.param(
            "{script}:make_step",
            ["--topology", "v9:2x2"],
            "'v9:2x2' names no TPUs",
            marks=needs_libtpu,
        ),
    ],
)
def test_wrong_commands(
    script: str,
    target: str,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        main([target.format(script=script), *options])
    assert exit_info.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert lazyxla._C.captured_platform() == ""


def test_what_the_command_cannot_keep(
    script: str, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main([f"{script}:make_step", "--cache-dir", str(tmp_path / "file")]) == 1
    assert "python -m lazyxla.aot: [Errno 20] Not a directory" in capsys.readouterr().err
