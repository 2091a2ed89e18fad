"""Compiling a function, a module or a training step on inputs that have no data."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only, tree_map_with_path

from lazyxla import _C
from lazyxla.aot.capturing import Recording, recording, resolve
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.topologies import Options, Topology, check_options
from lazyxla.mesh import Mesh
from lazyxla.modes import eager_mode
from lazyxla.spmd import SpecOf, shard

MeshLike = Mesh | tuple[Sequence[int], Sequence[str]]
"""A mesh, or its shape and the names of its axes."""

_STEPS = 3  # the first makes the optimizer's state, the second shows which numbers vary


def compile(
    fn_or_module: Callable[..., Any],
    example_inputs: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    topology: str | Topology | None = None,
    mesh: MeshLike | None = None,
    shardings: Callable[[nn.Module, Mesh], Any] | None = None,
    input_spec: SpecOf = (),
    train_step: Callable[[nn.Module], Callable[..., Any]] | None = None,
    options: Options | None = None,
    store: bool | str | os.PathLike[str] = False,
) -> CompiledProgram:
    """Compiles the program of a call, without running it, for devices that need not be attached.

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

    Tensors, parameters and buffers may be on any device, also on "meta": only their shape, dtype,
    strides and ``requires_grad`` are used. The call gets tensors on "lazyxla" that have no data
    instead, and a copy of the module on such tensors; the module itself is not changed, and no
    memory is allocated. Without `train_step` the call is compiled for its result alone, not for a
    backward pass to come.

    With a `mesh` the program is partitioned over all devices of the topology::

        def shardings(model, mesh):
            lazyxla.fully_shard(model, mesh, "data")

        print(lazyxla.aot.compile(model, (x, y), topology="v5p:4x4x4", train_step=training,
                                  mesh=((64,), ("data",)), shardings=shardings,
                                  input_spec=("data",)))

    Args:
        fn_or_module: a function, or an ``nn.Module``, which is compiled in the mode (``train()``,
            ``eval()``) that it is in.
        example_inputs: its positional arguments, a tuple or list. Tensors may be inside of lists
            and dicts; what is no tensor is passed on as it is.
        kwargs: its keyword arguments.
        topology: what to compile for, or its name, see :func:`lazyxla.aot.topology`. None is what
            this process runs on.
        mesh: the mesh that the program is partitioned over: a :class:`lazyxla.Mesh`, or its shape
            and the names of its axes. It has as many devices as the topology. None compiles for one
            device.
        shardings: a function of the copy of the module and the mesh, which shards the copy:
            :func:`lazyxla.fully_shard`, :func:`lazyxla.parallelize`, :func:`lazyxla.shard`. Every
            device holds the rest whole.
        input_spec: how the tensors among the inputs are split over the mesh: a spec for all of
            them, or a function that returns one for a tensor's path among the arguments (``"0"``,
            ``"0.tokens"``, or its keyword) and the tensor. ``()``: every device has them whole.
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
            tensor that is not dense; or the mesh has not as many devices as the topology, or a spec
            does not fit it; or the compiler does not take the options.
        RuntimeError: the call reads a value or uses an operator that runs on the host; the message
            names the line.
        torch.OutOfMemoryError, LoweringError: see :meth:`Topology.compile`.
        OSError: the directory cannot be written.
    """
    _check(fn_or_module, example_inputs, kwargs, train_step)
    _check_shardings(fn_or_module, mesh, shardings, input_spec)
    check_options(options)
    target = resolve(topology)
    with recording(target) as record, eager_mode(False):
        devices = None if mesh is None else _mesh(mesh, target)
        args, keywords = _abstract_inputs(
            (tuple(example_inputs), dict(kwargs or {})), devices, input_spec
        )
        call = fn_or_module
        if isinstance(fn_or_module, nn.Module):
            call = module = _abstract_module(fn_or_module)
            if devices is not None and shardings is not None:
                shardings(module, devices)
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


def stablehlo(
    fn_or_module: Callable[..., Any],
    *args: Any,
    topology: str | Topology | None = None,
    **kwargs: Any,
) -> str:
    """The program that a call records, as text of StableHLO; nothing is run.

    Args:
        fn_or_module: a function of tensors of the device, or a module, wherever it is.
        args, kwargs: its arguments: pytrees of tensors, on any device, whose data do not count, and
            of other things.
        topology: what to lower for, see :func:`lazyxla.aot.topology`; None is what this process
            runs on.

    Returns:
        The module; where the call flushes in between, one module after the other.

    Raises:
        ValueError: the call records nothing.
        RuntimeError: it reads a value or uses an operator that runs on the host.
        LoweringError: an operator has no lowering.
    """
    _check(fn_or_module, args, kwargs, None)
    target = resolve(topology)
    with recording(target) as record, eager_mode(False):
        inputs, keywords = _abstract_inputs((args, kwargs), None, ())
        call = fn_or_module
        if isinstance(fn_or_module, nn.Module):
            call = _abstract_module(fn_or_module)
        programs = _record(record, call, inputs, keywords)
    if not programs:
        raise ValueError(_NOTHING)
    return "\n".join(target.lower_to_text(each.program) for each in programs)


def _record(
    record: Recording, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any]:
    """The programs of one call: of what is pending when it starts, nothing."""
    _C.flush()
    before = len(record.sequence)
    # The result has to be alive when the program is cut; what autograd keeps for it does not.
    result = tree_map_only(torch.Tensor, torch.Tensor.detach, call(*args, **kwargs))
    _C.flush()
    del result
    return record.sequence[before:]


def _check(fn_or_module: Any, example_inputs: Any, kwargs: Any, train_step: Any) -> None:
    if isinstance(fn_or_module, type) or not callable(fn_or_module):
        raise TypeError(f"expected a function or a module, not {fn_or_module!r}")
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


def _check_shardings(fn_or_module: Any, mesh: Any, shardings: Any, input_spec: Any) -> None:
    if mesh is None and (shardings is not None or input_spec != ()):
        raise TypeError("shardings and input_spec say how a mesh is used, and there is no mesh")
    if shardings is None:
        return
    if not callable(shardings):
        raise TypeError(f"shardings is a function of the module and the mesh, not {shardings!r}")
    if not isinstance(fn_or_module, nn.Module):
        raise TypeError(f"shardings need the module that they spread, not {fn_or_module!r}")


def _mesh(mesh: MeshLike, target: Topology) -> Mesh:
    """The mesh, made of the topology's devices. To be called during the capture."""
    if not isinstance(mesh, Mesh):
        if not isinstance(mesh, (tuple, list)) or len(mesh) != 2:
            raise TypeError(
                "a mesh is a lazyxla.Mesh, or its shape and the names of its axes such as "
                f'((8, 2), ("data", "model")), not {mesh!r}'
            )
        shape, names = mesh
        if math.prod(shape) == target.num_devices:
            return Mesh(shape, names)
    else:
        shape = mesh.shape
        if mesh.size == target.num_devices:
            return mesh
    raise ValueError(
        f"a mesh of shape {tuple(shape)} has {math.prod(shape)} devices, and {target} has "
        f"{target.num_devices}"
    )


def _abstract_inputs(inputs: Any, mesh: Mesh | None, input_spec: SpecOf) -> Any:
    """Arguments and keywords with tensors like theirs on the device, spread over the mesh."""

    def abstract(path: tuple[Any, ...], tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        fresh = _abstract(tensor)
        if mesh is not None:
            spec = input_spec
            if callable(spec):
                spec = spec(".".join(_name(key) for key in path[1:]), tensor)
            shard(fresh, mesh, spec)
        return fresh

    return tree_map_with_path(abstract, inputs)


def _name(key: Any) -> str:
    """Of one step in the path to a tensor: an index, a key, or an attribute."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


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
    # Results that a module keeps, such as the weight that weight_norm computes before each call:
    # they cannot be copied, and a move to the device leaves them, too.
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                tensors[id(value)] = value
    return copy.deepcopy(module, tensors)
