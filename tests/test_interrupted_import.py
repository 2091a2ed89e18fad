"""Ctrl-C while the package is imported: another import completes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Processes that are forked have PyTorch already, and import the package with a profile function
# that presses Ctrl-C at the n-th call of a function of torch.library, which registers operators.
IMPORTING = """
import os, random, signal, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore


def calls_until(at):
    "Imports the package, interrupted at a call; how many calls there were."
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        counts = event == "call" and frame.f_code.co_filename == torch.library.__file__
        calls += counts
        if counts and calls == at:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(count)
    try:
        import lazyxla
    finally:
        sys.setprofile(None)
    return calls


def in_child(function):
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interrupted(at):
    try:
        calls_until(at)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the interrupt was swallowed")
    import lazyxla
    x = torch.ones(3, device="lazyxla") + 1
    assert lazyxla.counters()["nodes_recorded"] >= 1
    assert lazyxla.rotary_embedding and lazyxla.ragged_paged_attention


read, write = os.pipe()
assert in_child(lambda: os.write(write, str(calls_until(0)).encode())) == 0
calls = int(os.read(read, 20))
chance = random.Random(5)
chosen = chance.sample(range(1, calls), COUNT)
wrong = [n for n in chosen if in_child(lambda: interrupted(n)) != 0]
print(calls, wrong)
"""


def test_an_interrupted_import_can_be_done_again(run_python: Callable[..., Any]) -> None:
    result = run_python(IMPORTING.replace("COUNT", "12"), timeout=300)
    calls, wrong = result.stdout.split(maxsplit=1)
    assert int(calls) > 100
    assert wrong.strip() == "[]", result.stderr
