"""``python -m lazyxla.aot``: a script's programs, compiled before the script runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import lazyxla
from lazyxla.aot.capturing import CapturedProgram, capture
from lazyxla.lowering import LoweringError

_DESCRIPTION = """\
Compiles the programs of a script's step before the script runs, and keeps them in the cache
directory, where the script finds them: its first step then compiles nothing. Nothing is run, and
the devices need not be there.
"""

_TARGET = """\
A function of a script that takes no arguments, makes what a step needs (the model, the optimizer,
a batch on the device "lazyxla"), and returns the step: a function without arguments, or a tuple of
a function and its arguments. The script is loaded as a module, not as "__main__".
"""

_EXAMPLE = """\
example:
  python -m lazyxla.aot train.py:make_step --topology v5e:2x2 --cache-dir warm
  rsync -a warm/ tpu-vm:warm/          # then, over there:
  LAZYXLA_CACHE_DIR=warm python train.py
"""


class _WrongTargetError(Exception):
    """The user's target is not a valid one; the message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        topology = lazyxla.aot.topology(given.topology)
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    try:
        programs = _record(given.target, topology, given.steps)
    except _WrongTargetError as error:
        parser.error(str(error))
    print(f"{len(programs)} programs for {topology}")
    for number, program in enumerate(programs, 1):
        times = "once" if program.times == 1 else f"{program.times} times"
        print(f"\n{number}: {len(program.program.nodes)} operators, recorded {times}")
        try:
            print(program.store(given.cache_dir), flush=True)
        except (LoweringError, RuntimeError, ValueError, OSError) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 1
    print(f"\nkept in {given.cache_dir or lazyxla.settings.cache_directory()}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lazyxla.aot",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="script.py:function", help=_TARGET)
    parser.add_argument(
        "--topology",
        help="what to compile for, for example v5e:2x2; default: the devices of this machine",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where to keep the programs, a LAZYXLA_CACHE_DIR; default: this user's",
    )
    parser.add_argument(
        "--steps",
        type=_count,
        default=3,
        help="how many steps to record: the first ones may differ from those that follow; default: "
        "%(default)s",
    )
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("at least one step is recorded")
    return count


def _record(target: str, topology: lazyxla.aot.Topology, steps: int) -> list[CapturedProgram]:
    """The programs of the script's step, in order of appearance."""
    with capture(topology) as programs:
        step, arguments = _step(target)
        lazyxla.sync()
        for _ in range(steps):
            result = step(*arguments)
            lazyxla.sync()
        del result  # was alive at the sync, as in a loop that keeps it
    if not programs:
        raise _WrongTargetError(f"{target} records nothing: its step does nothing on the device")
    return programs


def _step(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    path, colon, name = target.rpartition(":")
    if not (colon and path and name):
        raise _WrongTargetError(f"the target is written script.py:function, not {target!r}")
    make = getattr(_load(Path(path)), name, None)
    if not callable(make):
        raise _WrongTargetError(f"{path} has no function {name!r}")
    made = make()
    step, *arguments = made if isinstance(made, tuple) else (made,)
    if not callable(step):
        raise _WrongTargetError(
            f"{target} returns {type(step).__name__}: it is to return the step, a function, or a "
            "tuple of it and its arguments"
        )
    return step, tuple(arguments)


def _load(path: Path) -> ModuleType:
    """The script as a module, as if it was imported from its own directory."""
    if not path.is_file():
        raise _WrongTargetError(f"there is no script {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _WrongTargetError(f"{path} is no Python script")
    sys.path.insert(0, str(path.parent.resolve()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
