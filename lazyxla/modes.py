"""When recorded work runs.

Lazy, the default: at :func:`lazyxla.sync` or when a value is read. Eager: at every operator. Fused
eager: by itself, several operators at a time. A compiled region: once, at its end, in every
surrounding mode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from copy import copy, deepcopy
from typing import Any, Literal, TypeVar, overload

from torch import nn

from lazyxla import _C
from lazyxla.untraced import mark_function
from lazyxla.xla_options import Options, check_options

F = TypeVar("F", bound=Callable[..., Any])
EagerMode = Literal["fused"] | bool

_MODES: dict[object, _C.Mode] = {
    False: _C.Mode.LAZY,
    True: _C.Mode.EAGER,
    "fused": _C.Mode.FUSED,
}
_VALUES: dict[_C.Mode, EagerMode] = {mode: value for value, mode in _MODES.items()}  # type: ignore[misc]


@overload
def eager_mode() -> EagerMode: ...
@overload
def eager_mode(mode: EagerMode) -> _C.ModeSwitch: ...
def eager_mode(mode: EagerMode | None = None) -> EagerMode | _C.ModeSwitch:
    """Sets or returns the mode: when recorded operators run.

    ``eager_mode(True)`` switches the mode of the process for good (or, inside of a block, that of
    the block). ``with eager_mode(True):`` switches the mode of this thread for a block, and that of
    autograd's threads while they work for it. Operators that are pending run before the mode
    changes.

    Args:
        mode: True runs each operator at its call; each kind of call is compiled once, on the CPU
            not before it recurs often. "fused" runs operators by itself soon after, several at a
            time: little slower than lazy, without a sync. False is lazy: operators run at
            :func:`lazyxla.sync` or when a value is read. None leaves the mode as it is. An operator
            always runs asynchronously: its call returns once it is enqueued.

    Returns:
        Without an argument, the calling thread's mode (False in a compiled region); else a context
        manager.

    Raises:
        TypeError: `mode` is something else.
    """
    if mode is None:
        return _VALUES[_C.current_mode()]
    if not isinstance(mode, (bool, str)) or mode not in _MODES:
        raise TypeError(f'eager_mode() takes True, False or "fused", not {mode!r}')
    return _C.ModeSwitch(_MODES[mode])


class _Region(_C.RegionBlock):  # type: ignore[misc]
    """What :func:`compile` returns without a function: a context manager and a decorator."""

    def __call__(self, function: F) -> F:
        return _wrap(function, self)


@overload
def compile(
    fn_or_module: None = None,
    *,
    full_graph: bool = False,
    max_graphs: int | None = None,
    name: str | None = None,
    xla_options: Options | None = None,
    capture: Literal[False] = False,
) -> _Region: ...
@overload
def compile(
    fn_or_module: None = None,
    *,
    full_graph: bool = False,
    max_graphs: int | None = None,
    name: str | None = None,
    xla_options: Options | None = None,
    capture: bool,
) -> Callable[[F], F]: ...
@overload
def compile(
    fn_or_module: F,
    *,
    full_graph: bool = False,
    max_graphs: int | None = None,
    name: str | None = None,
    xla_options: Options | None = None,
    capture: bool = False,
) -> F: ...
def compile(
    fn_or_module: F | None = None,
    *,
    full_graph: bool = False,
    max_graphs: int | None = None,
    name: str | None = None,
    xla_options: Options | None = None,
    capture: bool = False,
) -> F | _Region | Callable[[F], F]:
    """Compiles a block, or each call of a function, as one program: a training step, for example.

    ::

        @lazyxla.compile
        def step(x, y): ...

        fast = lazyxla.compile(model, full_graph=True)

        with lazyxla.compile(name="update"):
            optimizer.step()

    The Python code runs at every call and may do anything. Its operators are recorded, and a
    program is compiled once for each distinct graph. Operators that were pending before run first,
    so that they are no part of the program. The block's own operators run when it ends, also if it
    ends by an exception. (After a Ctrl-C they stay pending.) Then the former mode is back. Blocks
    may nest: the outermost is the program. Without `full_graph`, reading a value inside cuts the
    program in two.

    Args:
        fn_or_module: a function, method, other callable, or ``nn.Module``. In a generator function
            each stretch from one ``yield`` to the next is a program. For a module the result is a
            module of the same class with the same parameters, buffers and hooks. For None it is a
            context manager, which is also a decorator.
        full_graph: makes it an error to cut the program: to read a value, to call
            :func:`lazyxla.sync`, to use an operator that runs on the host.
        max_graphs: the most programs that may be compiled; an error says why another is needed. A
            training step needs one, but two if its first step computes something else, as that of
            SGD with dampening does.
        name: what messages call it; None takes the function's or the class's name.
        xla_options: options of XLA's compiler by name, for example
            ``{"xla_cpu_enable_fast_math": True}``, for its programs; over those of
            ``lazyxla.settings.xla_options``. In nested blocks the outermost's are used.
        capture: for a function that is a training step. Once a call has been recorded, a later one
            runs its program without running the Python code, if nothing that the code can read has
            changed: docs/modes.md says what is compared. Any other call runs the code. What the
            function does besides computing must be to return tensors and to change those of its
            models and optimizers. Without a function, makes a decorator only.

    Returns:
        The compiled function or module; it returns what the original returns.

    Raises:
        TypeError: `fn_or_module` is a class, an async function, or not callable; `capture` is for a
            generator function or a module; `xla_options` is no dict of such values; `max_graphs` is
            no integer, `name` no string.
        ValueError: `max_graphs` is less than 1, or the compiler does not take the options.
        RuntimeError: by the compiled function, see `full_graph` and `max_graphs`. The message names
            the line. What was recorded is not lost: reading a value runs it.
    """
    if max_graphs is not None and type(max_graphs) is not int:
        raise TypeError(f"max_graphs must be an integer, got {max_graphs!r}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if max_graphs is not None and max_graphs < 1:
        raise ValueError(f"max_graphs must be at least 1, got {max_graphs}")
    options = check_options(xla_options, "lazyxla.compile's xla_options")
    if capture and fn_or_module is None:
        return functools.partial(
            compile,  # type: ignore[arg-type]
            full_graph=full_graph,
            max_graphs=max_graphs,
            name=name,
            xla_options=xla_options,
            capture=True,
        )
    region = _Region(name or _name_of(fn_or_module), full_graph, max_graphs, options)
    if fn_or_module is None:
        return region
    if capture:
        return _captured(fn_or_module, region, name or _name_of(fn_or_module))
    return _wrap(fn_or_module, region)


def step() -> _Region:
    """One step of a training loop: ``with lazyxla.step(): ...``.

    The block is one program, as with :func:`compile`; it needs no :func:`lazyxla.sync`.
    """
    return compile(name="step")


def _name_of(thing: object) -> str:
    if thing is None:
        return "block"
    return getattr(thing, "__qualname__", None) or type(thing).__qualname__


def _captured(function: F, region: _Region, name: str) -> F:
    """A function whose settled calls run no Python code."""
    from lazyxla.steps.capturing import CapturedFunction

    _wrap(function, region)  # raises TypeError for what is no function
    if isinstance(function, nn.Module) or inspect.isgeneratorfunction(_code_of(function)):
        raise TypeError(f"lazyxla.compile() captures functions that are steps, not {function!r}")
    captured = CapturedFunction(function, region, name)

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return captured(args, kwargs)

    mark_function(compiled)  # type: ignore[arg-type]
    return compiled  # type: ignore[return-value]


def _wrap(function: F, region: _Region) -> F:
    if isinstance(function, type) or not callable(function):
        raise TypeError(f"lazyxla.compile() takes a function or a module, not {function!r}")
    code = _code_of(function)
    if inspect.iscoroutinefunction(code) or inspect.isasyncgenfunction(code):
        raise TypeError(
            f"lazyxla.compile() cannot make a program of {_name_of(function)}: an async function "
            "is suspended at any time; compile what it calls"
        )
    if isinstance(function, nn.Module):
        return _compiled_module(function, region)  # type: ignore[return-value]

    @functools.wraps(function)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with region:
            region.give((args, kwargs))
            return function(*args, **kwargs)

    @functools.wraps(function)
    def stretches(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return _stretches(function(*args, **kwargs), region)

    wrapped = stretches if inspect.isgeneratorfunction(code) else compiled
    mark_function(wrapped)  # type: ignore[arg-type]
    return wrapped  # type: ignore[return-value]


def _code_of(thing: Any) -> Any:
    """The function that a call runs: of a callable object, the method of its class."""
    is_function = inspect.isroutine(thing) or isinstance(thing, functools.partial)
    return thing if is_function else type(thing).__call__


def _stretches(generator: Generator[Any, Any, Any], region: _Region) -> Generator[Any, Any, Any]:
    """Runs a generator, each stretch between its yields in the region."""
    resume: Callable[[], Any] = functools.partial(next, generator)
    while True:
        try:
            with region:
                items = [resume()]
        except StopIteration as end:
            return end.value
        del resume  # nothing is kept alive that was sent, or, while this waits, was yielded
        try:
            sent = yield items.pop()
        except GeneratorExit:
            with region:
                generator.close()
            raise
        except BaseException as error:
            resume = functools.partial(generator.throw, error)
        else:
            resume = functools.partial(generator.send, sent)
            del sent


def _itself(module: nn.Module) -> nn.Module:
    return module


class _Unannounced:
    """A first base of a class, of which ``__init_subclass__`` of its other bases does not hear."""

    def __init_subclass__(cls) -> None:
        pass


def _compiled_module(module: nn.Module, region: _Region) -> nn.Module:
    """Another instance of the module's class, on the same state, whose calls are in the region."""
    original = type(module)
    if getattr(original, "cls_to_become", None) is not None:
        raise TypeError(
            f"lazyxla.compile() cannot take a {original.__name__} before its first call, which "
            "makes another class of it; call it once before, or compile a module that has it"
        )

    def plain(self: nn.Module) -> nn.Module:
        view = object.__new__(original)
        object.__setattr__(view, "__dict__", self.__dict__)
        return view

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with region:
            region.give((args, kwargs))
            return original.__call__(self, *args, **kwargs)

    methods = {
        "__module__": original.__module__,
        "__doc__": original.__doc__,
        "__call__": call,
        # A copy is compiled, too; what is pickled is the module itself.
        "__copy__": lambda self: _compiled_module(copy(plain(self)), region),
        "__deepcopy__": lambda self, memo: _compiled_module(deepcopy(plain(self), memo), region),
        "__reduce_ex__": lambda self, protocol: (_itself, (plain(self),)),
    }
    compiled: nn.Module = object.__new__(type(original.__name__, (_Unannounced, original), methods))
    # Past the class's own __setattr__: torch.jit's wants an __init__ to have run.
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled
