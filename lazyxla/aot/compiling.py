"""Compiling a function, a module or a training step on inputs that have no data."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from lazyxla import _C
from lazyxla.aot.capturing import Recording, recording
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.topologies import Options, Topology
from lazyxla.modes import eager_mode

_STEPS = 3  # the first makes the optimizer's state, the second shows which numbers vary


def compile(
    fn_or_module: Callable[..., Any],
    example_inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    topology: str | Topology | None = None,
    train_step: Callable[[nn.Module], Callable[..., Any]] | None = None,
    options: Options | None = None,
    store: bool | str | os.PathLike[str] = False,
) -> CompiledProgram:
    """Compiles what a call would run, without running it, for devices that need not be there.

    ::

        report = lazyxla.aot.compile(model, (x,), topology="v5e:2x2")
        print(report)

        def training(model):
            optimizer = torch.optim.AdamW(model.parameters())
            def step(x, y):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss
            return step

        print(lazyxla.aot.compile(model, (x, y), topology="v5e:2x2", train_step=training))

    Of tensors only shape, dtype, strides and ``requires_grad`` count; they may be on any device,
    also on "meta", and so may the module's parameters and buffers. The call gets tensors on
    "lazyxla" in their place, which have no data, and a copy of the module on such tensors: the
    module itself is not changed, and nothing of it is allocated. Without `train_step` the call is
    compiled for its result alone, not for a backward pass to come.

    Args:
        fn_or_module: a function, or an ``nn.Module``, which is compiled in the mode (``train()``,
            ``eval()``) that it is in.
        example_inputs: its positional arguments, a tuple or list. Tensors may be inside of lists
            and dicts; what is no tensor is passed on as it is.
        kwargs: its keyword arguments.
        topology: what to compile for, or its name, see :func:`lazyxla.aot.topology`. None is what
            this process runs on.
        train_step: compiles a training step. It is called with the copy of the module, makes what
            training takes, and returns the step, a function of the inputs. The step is recorded
            three times, as the first two may differ from those that follow, and the last one
            is compiled.
        options: the compiler's options by name.
        store: keeps what was compiled on disk, where processes that run the same find it: True in
            this process's cache directory, or a directory, see :meth:`CapturedProgram.store`. Of a
            training step all programs are kept, those of the first steps, too.

    Returns:
        The compiled program, with its memory, the compiler's estimates, and with a module's
        ``num_parameters``.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: the call records nothing, or breaks into several programs; or an input is a
            tensor that is not dense.
        RuntimeError: the call reads a value or uses an operator that runs on the host; the message
            names the line.
        torch.OutOfMemoryError, LoweringError: see :meth:`Topology.compile`.
        OSError: the directory cannot be written.
    """
    _check(fn_or_module, example_inputs, kwargs, train_step)
    with recording(topology) as record, eager_mode(False):
        args, keywords = _abstract_inputs((tuple(example_inputs), dict(kwargs or {})))
        call = fn_or_module
        if isinstance(fn_or_module, nn.Module):
            call = module = _abstract_module(fn_or_module)
            if train_step is not None:
                call = train_step(module)
        if not callable(call):
            raise TypeError(f"train_step returns the step, a function, not {call!r}")
        programs = []
        for _ in range(1 if train_step is None else _STEPS):
            programs = _record(record, call, args, keywords)
    if len(programs) != 1:
        raise ValueError(_NOTHING if not programs else _SEVERAL.format(len(programs)))
    if store is False:
        compiled = programs[0].compile(options)
    else:
        directory = None if store is True else store
        others = [program for program in record.programs if program is not programs[0]]
        for program in others:
            program.store(directory, options)
        compiled = programs[0].store(directory, options)
    if isinstance(fn_or_module, nn.Module):
        compiled.num_parameters = sum(p.numel() for p in fn_or_module.parameters())
    return compiled


_NOTHING = "the call computes nothing on the device: its result needs none of its inputs"
_SEVERAL = (
    "the call breaks into {} programs, since it calls lazyxla.sync() or switches modes; "
    "lazyxla.aot.capture() shows them all"
)


def _record(
    record: Recording, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """The programs of one call: of what is pending when it starts, nothing."""
    _C.flush(_C.Cause.MODE)
    before = len(record.sequence)
    # The result has to be alive when the program is cut; what autograd keeps for it does not.
    result = tree_map_only(torch.Tensor, torch.Tensor.detach, call(*args, **kwargs))
    _C.flush(_C.Cause.MODE)
    del result
    return record.sequence[before:]


def _check(fn_or_module: Any, example_inputs: Any, kwargs: Any, train_step: Any) -> None:
    if isinstance(fn_or_module, type) or not callable(fn_or_module):
        raise TypeError(f"aot.compile() takes a function or a module, not {fn_or_module!r}")
    if not isinstance(example_inputs, (tuple, list)):
        raise TypeError(
            "example_inputs is a tuple or list of the arguments, not "
            f"{type(example_inputs).__name__}; for a single one write (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a dict of keyword arguments, not {type(kwargs).__name__}")
    if train_step is None:
        return
    if not callable(train_step):
        raise TypeError(
            "train_step is a function that takes the module and returns the step, not "
            f"{train_step!r}"
        )
    if not isinstance(fn_or_module, nn.Module):
        raise TypeError(f"a train_step needs the module that it trains, not {fn_or_module!r}")


def _abstract_inputs(inputs: Any) -> Any:
    return tree_map_only(torch.Tensor, _abstract, inputs)


def _abstract(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, on the device and without data."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise ValueError(f"the device has dense tensors only, not {tensor.layout} ones")
    with torch.no_grad():
        fresh = torch.empty_like(tensor, device="lazyxla")
    if fresh.numel():
        _C.make_abstract(fresh)
    return fresh.requires_grad_(tensor.requires_grad)


def _abstract_module(module: nn.Module) -> nn.Module:
    """A copy of the module on abstract tensors; ties between parameters are kept."""
    tensors: dict[int, torch.Tensor] = {}
    for parameter in module.parameters():
        fresh = _abstract(parameter.detach())
        tensors[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        tensors[id(buffer)] = _abstract(buffer)
    return copy.deepcopy(module, tensors)
