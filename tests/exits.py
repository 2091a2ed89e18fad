"""Processes that end in the middle of work: tests/test_exit.py starts this.

    python tests/exits.py exit 100     children that begin to use the device, and end
    python tests/exits.py fork 100     children of a process that uses the device
    python tests/exits.py watched 5    processes that work with others: each of WATCHED in turn

Every child is forked from one process that has imported everything, which is much quicker than a
process of its own. It prints what went wrong, as JSON: a list of {number, work, end, problem}.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import random
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import lazyxla
import lazyxla.lowering.rules
from lazyxla import _C

SECONDS = 40  # that a child may take
alive: list[Any] = []  # until the interpreter drops it


def tensors() -> None:
    alive.extend(torch.randn(n, n).to("lazyxla") for n in range(1, 20))
    alive.append((alive[3] @ alive[3]).cpu())


def pending() -> None:
    x = torch.ones(8, 8).to("lazyxla")
    for _ in range(100):
        x = x.sin() + 1
    alive.append(x)


def eager() -> None:
    """Each call compiles a program in the background."""
    lazyxla.eager_mode(True)
    alive.extend(torch.ones(n).to("lazyxla").sin().cumsum(0) for n in range(20, 40))


def fused() -> None:
    """A thread looks after what is pending."""
    lazyxla.eager_mode("fused")
    for n in range(40, 50):
        x = torch.ones(n).to("lazyxla")
        for _ in range(10):
            x = x.cos() * 2
        alive.append(x)


def backward() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model.to("lazyxla")
    model.register_full_backward_hook(lambda *_: None)
    x = torch.ones(4, 8).to("lazyxla").requires_grad_()
    model(x).sum().backward()
    alive.append(model)


def execution() -> None:
    """A program that runs for a while, partly on the host."""
    x = torch.randn(150, 150).to("lazyxla")
    for _ in range(3):
        x = torch.linalg.svd(x @ x)[0]
    lazyxla.sync()
    alive.append(x)


def spread() -> None:
    """Programs for all devices: a thread frees the many handles of what they have consumed."""
    count = lazyxla.device_count()
    mesh = lazyxla.Mesh((count,), ("data",))
    alive.extend(lazyxla.shard(torch.ones(count), mesh, ("data",)) for _ in range(130))
    for _ in range(3):
        for x in alive:
            x.add_(1)
        lazyxla.sync()


def loader() -> None:
    iterator = iter(lazyxla.DeviceLoader(torch.full((9,), float(i)) for i in range(10**6)))
    alive.extend((iterator, next(iterator), next(iterator)))


def compiled() -> None:
    alive.append(torch.compile(_function, backend="lazyxla")(torch.ones(4).to("lazyxla")))


def _function(x: torch.Tensor) -> torch.Tensor:
    return x.exp() * 2


def cycle() -> None:
    """What only the last garbage collection finds."""
    ring: list[Any] = [torch.ones(5).to("lazyxla") + 1]
    ring.append(ring)


WORK = (tensors, pending, eager, fused, backward, execution, spread, loader, compiled, cycle)


def waiting_in_the_store() -> None:
    """A process is alive although a thread of it waits in the store, as for others to connect."""
    alive.append(torch.ones(3, device="lazyxla").cpu())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))  # it outlives the interpreter
    reader = dist.TCPStore("127.0.0.1", store.port)
    threading.Thread(target=store.wait, args=(["come"],), daemon=True).start()
    time.sleep(0.1)
    watch(store, members=1)
    seen: set[bytes] = set()
    deadline = time.monotonic() + 10
    while len(seen) < 3:
        assert time.monotonic() < deadline, seen
        if reader.check(["alive/0"]):
            seen.add(reader.get("alive/0"))
        time.sleep(0.05)
    reader.set("come", "")


def watch(store: dist.Store, members: int, seconds: float = 0.6) -> None:
    _C.start_heartbeat(store, 0, members, timedelta(seconds=seconds))


def forked_while_watching() -> None:
    alive.append(torch.ones(3, device="lazyxla").cpu())
    watch(dist.HashStore(), members=1, seconds=100)
    time.sleep(0.2)  # until the thread waits for its next turn
    assert not (problem := Child([], at_end).problem(20)), problem


def forked_from_a_group() -> None:
    dist.init_process_group("lazyxla", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(3, device="lazyxla")
    dist.all_reduce(x)
    x.tolist()
    assert not (problem := Child([dist.destroy_process_group], at_end).problem(20)), problem


def work_for_long() -> None:
    """The device works for minutes, as if it waited for the other process, which is gone."""
    x = torch.randn(3000, 3000).to("lazyxla")
    y = x
    for _ in range(300):
        y = y @ x * 1e-2
    lazyxla.sync()  # compiles it, and does not wait for it
    alive.append(y)
    watch(dist.HashStore(), members=2)


def given_up() -> None:
    work_for_long()
    time.sleep(1)


def given_up_at_the_end() -> None:
    """The process watches the others until its devices have done their work."""
    assert not (problem := Child([work_for_long], at_end).problem(30)), problem


WATCHED = (
    waiting_in_the_store,
    forked_while_watching,
    forked_from_a_group,
    given_up,
    given_up_at_the_end,
)


def at_end() -> None:
    pass


def by_exit() -> None:
    sys.exit(0)


def at_once() -> None:
    os._exit(0)


ENDS = (at_end, by_exit)


def forked_use() -> None:
    """The device of the parent is told to be gone."""
    for use in (lambda: torch.ones(2, device="lazyxla").add(1).cpu(), lazyxla.sync):
        message = "no error"
        try:
            use()
        except RuntimeError as error:
            message = str(error)
        assert "before this process was forked" in message, message
    gc.collect()


class Child:
    """A child process, and what it writes to its standard error."""

    def __init__(self, work: list[Callable[[], None]], end: Callable[[], None]) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            os.dup2(writer, 2)
            os.close(writer)
            for function in work:
                function()
            end()
            raise _End
        os.close(writer)
        self.reader = reader

    def problem(self, seconds: float = SECONDS) -> str:
        """Waits for its end; empty if it was a good one."""
        told, deadline = b"", time.monotonic() + seconds
        while True:
            ready, _, _ = select.select([self.reader], [], [], deadline - time.monotonic())
            chunk = os.read(self.reader, 10_000) if ready else b""
            if not chunk:
                break
            told += chunk
        os.close(self.reader)
        if not ready:
            os.kill(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        lines = [line for line in told.decode(errors="replace").splitlines() if line not in _NOISE]
        text = "\n".join(lines)[-2000:]
        if not ready:
            return f"hangs; {text}"
        return f"exit status {code}; {text}" if code or text.strip() else ""


# What JAX says of its own plugin for CUDA, where that is half installed.
_NOISE = ("cuda_plugin_extension is not found.",)


class _End(BaseException):
    """Leaves everything, so that the interpreter ends as after a script's last line."""


def import_everything() -> None:
    """What a first graph imports. The devices are not started."""
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX's, of its own threads
    rules = pkgutil.iter_modules(lazyxla.lowering.rules.__path__, "lazyxla.lowering.rules.")
    needed = ("jax", "functorch.compile", "torch._dynamo", "torch._refs", "lazyxla.dynamo")
    for name in (*needed, "jaxlib.mlir.dialects.stablehlo", *(rule.name for rule in rules)):
        importlib.import_module(name)


def main(kind: str, count: int, seed: int) -> None:
    rng = random.Random(seed)
    problems = []
    import_everything()
    if kind == "fork":
        use_the_device()
    for number in range(count):
        if kind == "watched":
            work, end = [WATCHED[number % len(WATCHED)]], at_end
        elif kind == "exit":
            work = rng.sample(WORK, rng.randint(1, 3))
            end = rng.choice(ENDS)
        else:
            work, end = [forked_use] * rng.randrange(2), rng.choice((*ENDS, at_once))
        problem = Child(list(work), end).problem()
        if problem:
            names = [function.__name__ for function in work]
            problems.append(
                {"number": number, "work": names, "end": end.__name__, "problem": problem}
            )
            print(problems[-1], file=sys.stderr, flush=True)
    sys.stdout.write(json.dumps(problems) + "\n")
    sys.stdout.flush()
    os._exit(0)


def use_the_device() -> None:
    """All kinds of threads are at work from now on, and never pause for long."""
    loader()
    alive.append(alive.pop() + 1)
    backward()
    threading.Thread(target=_fused_steps, daemon=True).start()
    threading.Thread(target=_eager_steps, daemon=True).start()
    time.sleep(2)


def _fused_steps() -> None:
    with lazyxla.eager_mode("fused"):
        x = torch.ones(16, 16).to("lazyxla")
        while True:
            for _ in range(random.randrange(100)):
                x = (x @ x).tanh()
            time.sleep(random.random() / 20)  # so that the watching thread runs what is pending


def _eager_steps() -> None:
    with lazyxla.eager_mode(True):
        for n in range(1, 10**9):
            x = torch.ones(n % 1000 + 1).to("lazyxla")  # most are compiled in the background
            for _ in range(100):
                x = x.sin()


if __name__ == "__main__":
    lazyxla.settings.cache_dir = tempfile.mkdtemp(prefix="lazyxla-exits-")
    with contextlib.suppress(_End):
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
