"""Starting the processes of a test, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.distributed.all_cases import CASES

THEMES = sorted({case.__module__.rpartition(".")[2] for case in CASES.values()})
"""The files of cases."""

# What each script of `run` starts with: `group` says which member of it the process is.
_MEMBER = """
import sys, torch, torch.distributed as dist, lazyxla
rank, size, meet = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)
group = {"init_method": f"file://{meet}", "rank": rank, "world_size": size}
"""


def own_environment(**environment: str) -> dict[str, str]:
    """Of a process that finds these tests and leaves the machine's other cores to its fellows."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}


def start(command: Sequence[str], environments: Sequence[dict[str, str]]) -> list[Any]:
    """A Python process with this command line for each environment."""
    return [
        subprocess.Popen(
            [sys.executable, *(part.replace("{rank}", str(rank)) for part in command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank, environment in enumerate(environments)
    ]


def outputs(
    command: Sequence[str], environments: Sequence[dict[str, str]], timeout: float
) -> list[str]:
    """What each of the processes prints; all end well, and none is left if one does not.

    "{rank}" in the command stands for the process's number. Their errors are this process's, where
    pytest shows them if the test fails.
    """
    processes = start(command, environments)
    try:
        printed = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (_, errors) in enumerate(printed):
        lines = [line for line in errors.splitlines() if "frame #" not in line]
        print(f"process {rank}:", "\n".join(lines)[-4000:], sep="\n", file=sys.stderr)
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [output for output, _ in printed]


def run(
    code: str, size: int, where: Path, *arguments: str, timeout: float = 120, **environment: str
) -> list[str]:
    """What each process of a group prints that runs ``code``.

    It finds ``torch``, ``dist`` and ``lazyxla`` imported, its ``rank``, the group's ``size``,
    ``meet``, the name of a new file, the arguments in ``sys.argv[1:]``, and makes the group by
    ``dist.init_process_group("lazyxla", **group)``.
    """
    script = where / "script.py"
    script.write_text(_MEMBER + code)
    command = [str(script), "{rank}", str(size), str(where / "meet"), *arguments]
    return outputs(command, [own_environment(**environment)] * size, timeout)


def run_cases(
    theme: str, size: int, where: Path, timeout: float, **environment: str
) -> list[dict[str, Any]]:
    """What each process of tests/distributed/ranks.py found for a file's cases; all is well."""
    names = [name for name, case in CASES.items() if case.__module__.endswith(f".{theme}")]
    script = str(ROOT / "tests" / "distributed" / "ranks.py")
    command = [script, "{rank}", str(size), str(where / "meet"), *names]
    printed = outputs(command, [own_environment(**environment)] * size, timeout)
    results = [json.loads(output.splitlines()[-1]) for output in printed]
    for found in results:
        assert set(found) == set(names)
        problems = "\n".join(f"{name}: {case['problem']}" for name, case in found.items())
        assert not any(case["problem"] for case in found.values()), problems
    return results


def run_faults(count: int, *arguments: str, timeout: float, **environment: str) -> list[Any]:
    """What so many trials of tests/distributed/faults.py found wrong."""
    command = ["-m", "tests.distributed.faults", str(count), "0", *arguments]
    (output,) = outputs(command, [own_environment(**environment)], timeout)
    result: list[Any] = json.loads(output.splitlines()[-1])
    return result


def torchrun(processes: int, *command: str, **environment: str) -> list[str]:
    """The lines that the processes print."""
    program = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    (output,) = outputs([*program, *command], [own_environment(**environment)], timeout=300)
    return output.splitlines()
