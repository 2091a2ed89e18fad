"""Checks an entry of the table: one function per part, each for one sample.

A check returns the device's and the CPU's results; `check_entry` compares them. The results of
several samples are recorded before the first is read, so that they run as one program; if anything
fails, these samples are checked again one by one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lazyxla
from tests.opinfo import views
from tests.opinfo.choices import same_choice
from tests.opinfo.compare import DEVICE, as_exact, compare, copied
from tests.opinfo.entries import entries, layouts, samples, supports, tolerances
from tests.opinfo.error_inputs import difference, error_on, of_operator
from tests.opinfo.expected import judged_in_double
from tests.opinfo.integers import bounded_memory, is_affordable, with_integers
from tests.opinfo.outcome import INTEGERS, SIZES, VARIANTS, VIEWS, Mismatch, Outcome
from tests.opinfo.sizes import resized

# Their results are uninitialised memory.
UNINITIALISED = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
)


def _forward(op: OpInfo) -> Callable[[SampleInput], Any]:
    def run(sample: SampleInput) -> Any:
        return op(sample.input, *sample.args, **sample.kwargs)

    return run


def _backward(op: OpInfo) -> Callable[[SampleInput], Any]:
    def run(sample: SampleInput) -> Any:
        wanted = [
            x
            for x in tree_leaves((sample.input, sample.args, sample.kwargs))
            if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        first = sample.input
        if op.name.endswith("_") and isinstance(first, torch.Tensor):
            first = first.clone()  # a leaf cannot be written to
        result = sample.output_process_fn_grad(op(first, *sample.args, **sample.kwargs))
        outputs = [
            x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        if not outputs or not wanted:
            return []
        loss = sum((x.abs() if x.is_complex() else x).square().sum() for x in outputs)
        return torch.autograd.grad(loss, wanted, allow_unused=True)

    return run


def _inplace(op: OpInfo) -> Callable[[SampleInput], Any]:
    def run(sample: SampleInput) -> Any:
        result = op.get_inplace()(sample.input, *sample.args, **sample.kwargs)
        return result, sample.input

    return run


def _out(op: OpInfo) -> Callable[[SampleInput], Any]:
    def run(sample: SampleInput) -> Any:
        expected = op(sample.input, *sample.args, **sample.kwargs)

        def like(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

        out = like(expected) if isinstance(expected, torch.Tensor) else tuple(map(like, expected))
        result = op(sample.input, *sample.args, **sample.kwargs, out=out)
        return tuple(tree_leaves(result)), tuple(tree_leaves(out))

    return run


def _views(op: OpInfo) -> Callable[[SampleInput], Any]:
    return functools.partial(views.call, op)


_TOGETHER = 32
"""Samples per program. XLA needs minutes for hundreds of windows in one."""

_SEEDS = 256
"""With how many seeds the CPU may show that a result is random. Fractional pooling in 16 bits takes
other windows than usual with one draw in thirty."""

_RUN = {
    "forward": _forward,
    "backward": _backward,
    "inplace": _inplace,
    "out": _out,
    "layouts": _forward,
    VIEWS: _views,
    SIZES: _forward,
    INTEGERS: _forward,
}
_FORWARD = ("forward", "layouts", *VARIANTS)
_WITH_STRIDES = (*_FORWARD, VIEWS)
_VARIED = {SIZES: resized, INTEGERS: with_integers}


def check_entry(
    name: str, dtype: torch.dtype, part: str, limit: int | None = None, eager: bool = False
) -> Outcome:
    """Checks the first `limit` samples of an entry, or all calls that are errors.

    `eager`: in eager mode, every operator by itself.
    """
    op = entries()[name]
    limit = None if part == "errors" else limit
    outcome = Outcome(name, str(dtype).removeprefix("torch."), part, limit=limit)
    if not supports(op, dtype, part):
        return outcome
    lazyxla.reset_counters()
    with warnings.catch_warnings(), lazyxla.eager_mode(eager):
        warnings.simplefilter("ignore")
        if part == "errors":
            _check_errors(op, outcome)
        elif part in VARIANTS:
            _check_variants(op, dtype, part, limit, outcome)
        else:
            _check_samples(op, dtype, part, limit, outcome)
    outcome.fallbacks = dict(lazyxla.fallbacks())
    return outcome


def _check_samples(
    op: OpInfo, dtype: torch.dtype, part: str, limit: int | None, outcome: Outcome
) -> None:
    calls: list[tuple[SampleInput, Any]] = []
    made = samples(op, dtype, limit, gradients=part == "backward")
    for sample in itertools.chain.from_iterable(map(layouts, made)) if part == "layouts" else made:
        if part == "inplace" and sample.broadcasts_input:
            continue
        try:
            torch.manual_seed(0)
            calls.append((sample, _call(op, sample, "cpu", part)))
        except Exception:
            continue  # PyTorch's CPU has no result to compare with
    outcome.samples = len(calls)
    for first in range(0, len(calls), _TOGETHER):
        group = calls[first : first + _TOGETHER]
        _check_together(op, dtype, part, group, range(first, first + len(group)), outcome)


def _check_variants(
    op: OpInfo, dtype: torch.dtype, part: str, limit: int | None, outcome: Outcome
) -> None:
    """Errors at the call, dtypes, shapes and strides, and then the values of what has elements."""
    calls: list[tuple[SampleInput, Any]] = []
    numbers: list[int] = []
    for sample in _VARIED[part](samples(op, dtype, limit), op.name):
        if part == INTEGERS and not is_affordable(lambda s=sample: _call(op, s, "meta", part)):
            continue
        number, outcome.samples = outcome.samples, outcome.samples + 1
        theirs, wrong = _attempt(op, sample, "cpu", part)
        ours, error = _attempt(op, sample, DEVICE, part)
        if wrong or error:
            _compare_errors(error, wrong, _shapes(sample), number, outcome)
            continue
        try:
            compare(ours, theirs, values=False, strides=True, tolerances={})
        except Mismatch as mismatch:
            outcome.fail(mismatch.kind, f"{mismatch} for {_shapes(sample)}", number)
        else:
            if any(x.numel() for x in tree_leaves(theirs) if isinstance(x, torch.Tensor)):
                calls.append((sample, theirs))
                numbers.append(number)
    for first in range(0, len(calls), _TOGETHER):
        group = slice(first, first + _TOGETHER)
        _check_together(op, dtype, part, calls[group], numbers[group], outcome)


def _attempt(
    op: OpInfo, sample: SampleInput, device: str, part: str
) -> tuple[Any, Exception | None]:
    """The result and None, or None and the error that the call raises."""
    torch.manual_seed(0)
    try:
        with bounded_memory() if part == INTEGERS else contextlib.nullcontext():
            return _call(op, sample, device, part), None
    except Exception as error:
        return None, error


def _shapes(sample: SampleInput) -> str:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return str([tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves])


def _check_together(
    op: OpInfo,
    dtype: torch.dtype,
    part: str,
    calls: list[tuple[SampleInput, Any]],
    numbers: Sequence[int],
    outcome: Outcome,
) -> None:
    try:
        results = [_call(op, sample, DEVICE, part) for sample, _ in calls]
        lazyxla.sync()
    except Exception:
        results = [None] * len(calls)
    for number, (sample, expected), result in zip(numbers, calls, results, strict=True):
        try:
            if result is None:
                result = _call(op, sample, DEVICE, part)
            outcome.as_exact += _judge(op, dtype, part, sample, result, expected)
        except Mismatch as mismatch:
            outcome.fail(mismatch.kind, f"{mismatch}", number)
        except Exception as error:
            outcome.fail("raises", f"{type(error).__name__}: {error}", number)


def _call(
    op: OpInfo,
    sample: SampleInput,
    device: str,
    part: str,
    precise: bool = False,
) -> Any:
    """Runs a copy of the sample, for entries may write to their arguments.

    What a sample without tensors makes is on the default device.
    """
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    default: Any = contextlib.nullcontext()
    if not any(isinstance(x, torch.Tensor) for x in leaves):
        default = torch.device(device)
    with torch.set_grad_enabled(part == "backward"), default:
        return _RUN[part](op)(copied(op, sample, device, precise))


def _judge(
    op: OpInfo,
    dtype: torch.dtype,
    part: str,
    sample: SampleInput,
    result: Any,
    expected: Any,
) -> bool:
    """Compares, and says whether double precision had to decide.

    A result that the CPU itself does not repeat is random.
    """
    strides, bounds = part in _WITH_STRIDES, tolerances(op, dtype)
    try:
        values = op.name not in UNINITIALISED
        compare(result, expected, values=values, strides=strides, tolerances=bounds)
    except Mismatch as mismatch:
        if mismatch.kind != "values":
            raise
        compare(result, expected, values=False, strides=strides, tolerances=bounds)
        if part in _FORWARD and same_choice(op, sample, result, expected):
            return False
        named = judged_in_double(op.full_name, str(dtype).removeprefix("torch."), part)
        if not named or not as_exact(
            result, expected, _call(op, sample, "cpu", part, precise=True), bounds
        ):
            if _is_random(op, sample, part):
                return False
            raise
        return True
    return False


def _again(op: OpInfo, sample: SampleInput, part: str, seed: int) -> Any:
    """The CPU's result with another seed."""
    torch.manual_seed(seed)
    with mock.patch("torch.manual_seed"):  # random entries set a seed themselves
        return _call(op, sample, "cpu", part)


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _is_random(op: OpInfo, sample: SampleInput, part: str) -> bool:
    """Whether another seed gives another result on the CPU."""
    with _Draws() as draws:
        expected = _again(op, sample, part, 0)
    seeds = range(1, _SEEDS + 1) if draws.found else ()
    return any(_differ(_again(op, sample, part, seed), expected) for seed in seeds)


def _differ(first: Any, second: Any) -> bool:
    pairs = zip(tree_leaves(first), tree_leaves(second))
    return any(
        not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
        for x, y in pairs
        if isinstance(x, torch.Tensor)
    )


def _check_errors(op: OpInfo, outcome: Outcome) -> None:
    """What is an error on the CPU is one of the same type and in such words on the device."""
    for number, wrong in enumerate(of_operator(outcome.entry, op)):
        theirs = error_on("cpu", wrong)
        if theirs is None:
            continue
        outcome.samples += 1
        found = difference(wrong, theirs)
        if found is not None:
            outcome.fail(found.kind, found.message, number)


def _compare_errors(
    ours: Exception | None, theirs: Exception | None, call: str, number: int, outcome: Outcome
) -> None:
    """Notes if the device and the CPU do not raise errors of one type."""

    def told(error: Exception | None) -> str:
        return f"{type(error).__name__}: {error}"

    if ours is None:
        outcome.fail("accepts", f"{call}: no error instead of {told(theirs)}", number)
    elif theirs is None:
        outcome.fail("raises", f"{call}: {told(ours)}", number)
    elif not isinstance(ours, type(theirs)):
        outcome.fail("raises", f"{call}: {told(ours)} instead of {told(theirs)}", number)
