"""Threads that ask for the device's lock while others hold Python's: none waits for ever."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

import lazyxla
from tests.support import DEVICE

# Python's lock is taken wherever a tensor that Python knows of gets another owner. Whoever does
# that while it holds a device's waits for those who hold Python's and ask for the device's in turn.
ASKING_WHILE_OTHERS_WORK = """
import faulthandler, sys, threading
import torch, lazyxla
from tests.test_thread_locks import USES

faulthandler.dump_traceback_later(100, exit=True)  # needs no lock
sys.setswitchinterval(1e-6)
shared = [torch.ones(4, 6, device="lazyxla") for _ in range(3)]
lazyxla.sync()
over = threading.Event()
errors = []

def ask():
    while not over.is_set():
        for tensor in shared:
            lazyxla._C.is_pending(tensor)  # takes the device's mutex, and keeps Python's

def use(name):
    try:
        for _ in range(40):
            USES[name](shared)
    except BaseException as error:
        errors.append((name, error))

for name in USES:
    print(name, flush=True)
    threads = [threading.Thread(target=ask, daemon=True)]
    threads += [threading.Thread(target=use, args=(name,), daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    over.set()
    threads[0].join()
    over.clear()
assert not errors, errors
"""


def _in_mode(mode: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(shared: Any) -> None:
        with lazyxla.eager_mode(mode):
            function(shared)

    return run


def _in_region(shared: Any) -> None:
    with lazyxla.step():
        y = shared[0] * 2
        z = y + shared[1]
    z.sum().item()


def _train(shared: Any) -> None:
    w = shared[0].detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    (w * shared[1]).sum().backward()
    optimizer.step()
    w.detach().sum().item()


def _keep(shared: Any) -> None:
    event = torch.lazyxla.Event()
    shared[2].add_(0)
    event.record()
    event.synchronize()


USES: dict[str, Callable[[Any], Any]] = {
    "read": lambda s: s[0].cpu(),
    "read a view": lambda s: s[0].t()[1:3].cpu(),
    "read a number": lambda s: s[0][1, 2].item(),
    "read what is pending": lambda s: (s[0] + 1).t().cpu(),
    "write": lambda s: s[1].copy_(torch.ones(4, 6)),
    "write in place": lambda s: s[1].mul_(1),
    "write through a view": lambda s: s[1][1:].t().zero_(),
    "clone": lambda s: s[0].t().clone().contiguous(),
    "change the dtype": lambda s: s[0].double().float().sum().item(),
    "resize": lambda s: s[0].clone().resize_(2, 3).cpu(),
    "set": lambda s: torch.empty(0, device=DEVICE).set_(s[0].untyped_storage()),
    "list operators": lambda s: torch._foreach_add(s[:2], 1)[0].cpu(),
    "random numbers": lambda s: (torch.rand(3, device=DEVICE), torch.lazyxla.get_rng_state()),
    "sync": lambda s: lazyxla.sync(wait=True),
    "events": _keep,
    "print": lambda s: repr(s[0]),
    "compare": lambda s: torch.equal(s[0], s[0].clone()),
    "another device": lambda s: s[0].to(f"lazyxla:{torch.lazyxla.device_count() - 1}").cpu(),
    "host": lambda s: s[0].nonzero(),
    "strict eager": _in_mode(True, lambda s: (s[0] + s[1]).t().cpu()),
    "fused eager": _in_mode("fused", lambda s: (s[0] + s[1]).relu_().cpu()),
    "region": _in_region,
    "training": _train,
    "pickle": lambda s: torch.save(s[0], io.BytesIO()),
    "memory": lambda s: torch.lazyxla.memory_stats(),
    "storage": lambda s: s[0].untyped_storage().cpu(),
    "__dlpack__": lambda s: torch.from_dlpack(s[0].cpu()),
}


def test_no_lock_is_held_while_pythons_is_waited_for(run_python: Callable[..., Any]) -> None:
    result = run_python(ASKING_WHILE_OTHERS_WORK, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
