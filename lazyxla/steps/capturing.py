"""Calls of a captured step: which run its program, which run its code, and why."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from lazyxla import _C, lowering
from lazyxla.runtime import BACKEND
from lazyxla.steps.optimizers import Rates
from lazyxla.steps.reachable import Reach
from lazyxla.steps.results import Template, build, constants, describe
from lazyxla.steps.trust import Unfit

logger = logging.getLogger("lazyxla")

MOST_CAPTURES = 8
"""Programs that one step is kept captured as; the least recently used one is dropped."""

_PATIENCE = 4  # attempts in a row that may fail before they become rare

_rules_changed = itertools.count(1)
_rules = 0


def _note_change(*_: object) -> None:
    global _rules
    _rules = next(_rules_changed)


lowering.on_change(_note_change)


class CapturedFunction:
    """A function whose calls run what was recorded of it, where nothing that it reads differs."""

    def __init__(self, function: Callable[..., Any], region: Any, name: str) -> None:
        self._function = function
        self._region = region
        self._name = name
        self._captures: list[tuple[Any, Template]] = []  # those used last first
        self._rules = _rules
        self._rates = Rates()
        self._calls = self._failures = 0
        self._next_attempt = 2  # the first call makes what later ones use
        self._logged: set[str] = set()
        self._attempting = threading.RLock()  # a thread that Ctrl-C left it to may go on

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._rules != _rules:
            self._captures, self._rules = [], _rules
        why = None
        for position, (captured, template) in enumerate(self._captures):
            made = captured(args, kwargs)
            if type(made) is list:
                if position:
                    self._use(captured, template)
                return build(template, made)
            why = why or made
        if why:
            self._log("runs its Python code", why)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the function, and captures it if it is time to."""
        if _C.in_region() or not self._attempting.acquire(blocking=False):
            return self._plain(args, kwargs)
        try:
            self._calls += 1
            if self._calls > 1 and self._calls < self._next_attempt:
                with self._rates.as_tensors():
                    return self._plain(args, kwargs)
            reach = self._reach(args, kwargs)
            if reach is None:
                return self._plain(args, kwargs)
            if self._calls == 1:
                with self._rates.as_tensors():
                    return self._plain(args, kwargs)
            return self._capture(reach, args, kwargs)
        finally:
            self._attempting.release()

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._region:
            self._region.give((args, kwargs))
            return self._function(*args, **kwargs)

    def _reach(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reach | None:
        """All that the step can read; None if that cannot be compared."""
        try:
            reach = Reach(self._function, (args, kwargs), self._rates.varying)
            if self._rates.find(reach):
                reach = Reach(self._function, (args, kwargs), self._rates.varying)
        except RecursionError:
            self._fail("an argument holds itself, or is nested too deeply")
            return None
        except Unfit as unfit:
            self._fail(str(unfit))
            return None
        return reach

    def _sign(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]] | None:
        """What is compared of the arguments, and their tensors; None if a call with them cannot be
        captured."""
        try:
            signature = _C.StepSignature(args, kwargs)
            tensors = signature.tensors(args, kwargs)
            if any(t.device.type != BACKEND for t in tensors):
                raise Unfit("an argument is on the CPU: move it to the device before the call")
            if _C.torch_modes_active():
                raise Unfit("a mode is active, such as a default device or hooks of saved tensors")
            if torch.is_autocast_cache_enabled() and any(
                torch.is_autocast_enabled(device) for device in (BACKEND, "cpu")
            ):
                raise Unfit("autocast is on around it, and may keep casts: use it within the step")
        except (Unfit, TypeError) as unfit:
            self._fail(str(unfit))
            return None
        return signature, tensors

    def _capture(self, reach: Reach, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signed = self._sign(args, kwargs)
        if signed is None:
            with self._rates.as_tensors():
                return self._plain(args, kwargs)
        signature, tensors = signed
        state = _C.torch_state()
        on_host = torch.default_generator.get_state()
        recording = None
        try:
            with self._rates.as_tensors() as complete, self._region:
                self._region.give((args, kwargs))
                numbers = [number.tensor for number in self._rates.numbers]
                recording = _C.StepRecording(reach.tensors, numbers, tensors)
                result = self._function(*args, **kwargs)
        except BaseException:
            if recording is not None:
                recording.stop()
            raise
        try:
            template, fresh = describe(result, reach.tensors, reach.objects, (args, kwargs))
            program, why = recording.finish(fresh)
            if not complete:
                raise Unfit("its optimizers have changed")
            if self._rates.are_among(constants(template)):
                raise Unfit("it returns a learning rate, or text with one")
            if program is None:
                raise Unfit(why)
            if why := reach.guards.broken():
                raise Unfit(f"it changes what it reads: {why}")
            if _C.torch_state() != state:
                raise Unfit("it changes a mode or default of PyTorch's")
            if not torch.equal(torch.default_generator.get_state(), on_host):
                raise Unfit("it draws random numbers on the CPU")
            _check_arguments(signature, args, kwargs, tensors)
            guards = len(reach.guards)
            captured = _C.CapturedStep(reach.guards, signature, state, program, self._rates.numbers)
        except (Unfit, TypeError) as unfit:
            recording.stop()
            self._fail(str(unfit))
            return result
        self._failures = 0
        self._next_attempt = self._calls + 1
        self._use(captured, template)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s: captured, with %d guards", self._name, guards)
        return result

    def _use(self, captured: Any, template: Template) -> None:
        others = [each for each in self._captures if each[0] is not captured]
        self._captures = [(captured, template), *others][:MOST_CAPTURES]

    def _fail(self, why: str) -> None:
        self._failures += 1
        wait = 1 if self._failures < _PATIENCE else 2 ** min(self._failures - _PATIENCE + 1, 10)
        self._next_attempt = self._calls + wait
        self._log("is not captured", why)

    def _log(self, what: str, why: str) -> None:
        """Reports each reason once."""
        if why not in self._logged and logger.isEnabledFor(logging.INFO):
            self._logged.add(why)
            logger.info("%s %s: %s", self._name, what, why)


def _check_arguments(
    signature: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: list[torch.Tensor]
) -> None:
    """Raises Unfit if a step has changed what its arguments hold."""
    try:
        after = signature.tensors(args, kwargs)
        if all(a is b for a, b in zip(after, before, strict=True)):
            return
    except TypeError:
        pass
    raise Unfit("it changes what its arguments hold")
