"""Recording programs without running them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lazyxla import _C, xla_options
from lazyxla.aot import report, topologies
from lazyxla.aot.collectives import Grid
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.topologies import Options, Topology
from lazyxla.cache import program_store
from lazyxla.lowering import Lowered, Program
from lazyxla.random import default_generator


class CapturedProgram:
    """A program that :func:`capture` recorded.

    ``program`` is what is lowered, ``times`` how often the program came up: a training step that is
    recorded ten times is one program, after the first step or two.
    """

    def __init__(self, program: Program, options: Options, target: Topology, graph: Any) -> None:
        self.program = program
        self.times = 1
        self._options = options
        self._target = target
        self._graph = graph  # what the store knows it by, and what lowering it needs

    @functools.cached_property
    def lowered(self) -> Lowered:
        """As StableHLO. Raises LoweringError if an operator of the program has no lowering."""
        return self._target.lower(self.program)

    def compile(self, options: Options | None = None) -> CompiledProgram:
        """Compiles it, for all devices of its mesh if anything in it is sharded; arguments and
        errors are those of :meth:`Topology.compile`.

        Args:
            options: the compiler's options by name, over those that it was captured with.
        """
        given = topologies.check_options(options)
        try:
            return self._target._compile(self.lowered.artifact, given, self._options, self._grid())
        except torch.OutOfMemoryError as error:
            if self.program.partition is None:
                raise
            raise torch.OutOfMemoryError(f"{error}\n{self._largest_inputs()}") from error

    def _largest_inputs(self, count: int = 5) -> str:
        """The inputs that take most of a device's memory, and how they are spread."""
        partition = self.program.partition
        assert partition is not None
        inputs = []
        for (dtype, shape), spec in zip(self.program.inputs, partition.inputs, strict=True):
            tiles = math.prod(size for parts in spec for _, _, size in parts)
            axes = ["+".join(name for name, _, _ in parts) or "-" for parts in spec]
            inputs.append((math.prod(shape) * dtype.itemsize / tiles, dtype, shape, axes))
        inputs.sort(key=lambda each: -each[0])
        lines = [
            f"  {report.size(nbytes)}: {tuple(shape)} {dtype}, split by ({', '.join(axes)})"
            for nbytes, dtype, shape, axes in inputs[:count]
        ]
        total = report.size(math.fsum(nbytes for nbytes, *_ in inputs))
        return "\n".join([f"Its inputs take {total} of each device; the largest:", *lines])

    def _grid(self) -> Grid | None:
        """The grid that it is partitioned over; None if it is for one device."""
        if self.program.partition is None:
            return None
        devices = str(self._options["lazyxla_devices"]).split(",")
        return Grid(self.program.partition.axes, tuple(int(device) for device in devices))

    def store(
        self, directory: str | os.PathLike[str] | None = None, options: Options | None = None
    ) -> CompiledProgram:
        """Compiles it and keeps it on disk, where processes that run it find it.

        Such a process has the same versions, the same kind of device, and among its XLA options
        (``LAZYXLA_XLA_OPTIONS``) the `options` that are given here.

        Args:
            directory: the cache directory, as in ``LAZYXLA_CACHE_DIR``; None is this process's. It
                may be copied to another machine.
            options: as in :meth:`compile`.

        Raises:
            ValueError: nothing is to be kept: ``LAZYXLA_CACHE_SIZE`` is 0.
            OSError: the directory cannot be written.
            LoweringError, torch.OutOfMemoryError, TypeError, RuntimeError: as
                :meth:`Topology.compile`.
        """
        target, known = self._target, self._graph
        store = program_store.for_others(directory, target.platform, target._raw)
        compiled = self.compile(options)
        lowered = self.lowered
        graph = store.graph(known.key, _C.serialize_options({**self._options, **(options or {})}))
        # Numbers that are part of their operator have slots after the graph's own.
        static_slots = [slot for slot in lowered.static_slots if slot < len(known.slots)]
        _, keep = graph.add(known.variable, known.slots, static_slots, lowered.artifact)
        keep(compiled._raw.serialize())
        return compiled

    def __repr__(self) -> str:
        program = self.program
        return (
            f"CapturedProgram({len(program.nodes)} operators, {len(program.inputs)} inputs, "
            f"{len(program.outputs)} outputs, {self.times} times)"
        )


class Recording:
    """The programs that a capture has recorded so far; C++ calls it at every flush."""

    def __init__(self, target: Topology) -> None:
        self.programs: list[CapturedProgram] = []
        self.sequence: list[CapturedProgram] = []  # one for each flush
        self._target = target

    def take(self, number: int, program: Program | None, options: Any, graph: Any) -> None:
        """One more flush; `program` is None if its program is known, by its number."""
        if program is None:
            self.programs[number].times += 1
        else:
            self.programs.append(CapturedProgram(program, options, self._target, graph))
        self.sequence.append(self.programs[number])

    def static_slots(self, number: int) -> Sequence[int]:
        """The slots whose numbers are part of a program."""
        return self.programs[number].lowered.static_slots


@contextlib.contextmanager
def capture(topology: str | Topology | None = None) -> Iterator[list[CapturedProgram]]:
    """Records what the block does on the device "lazyxla", and runs none of it.

    ::

        with lazyxla.aot.capture("v5e:2x2") as programs:
            model = Model().to("lazyxla")
            optimizer = torch.optim.AdamW(model.parameters())
            for x, y in batches:
                train_step(model, optimizer, x.to("lazyxla"), y.to("lazyxla"))
                lazyxla.sync()
        print(programs[-1].compile())

    Each program that would have run is in the list that the block gets, in order of appearance: the
    initialization, the first step, the second. Equal ones are one. Tensors made in the block have
    no data and never get any: to read a value is an error, and so is an operator that runs on the
    host. Tensors of the device that have data are inputs of a program like any other; what is
    written to them is written to no effect, and when the block ends they have the data that they
    had before. So have the devices' default generators their state. What is not on the device, such
    as an optimizer's count of steps or a generator of the user's own, is as the block left it.

    There is one capture at a time, for all threads: while it is active, no work on the device is
    run.

    Args:
        topology: what to compile for, or its name, see :func:`topology`; None is what this process
            would run on.

    Raises:
        RuntimeError: a capture is active already.
        ImportError, ValueError: see :func:`topology`.
    """
    with recording(topology) as record:
        yield record.programs


_captured: list[Topology] = []  # what the capture that is active is for


def device() -> Any:
    """The device that programs are recorded for now, a _C.DeviceDescription."""
    return _captured[0]._raw.devices[0] if _captured else _C.device_description(0)


@contextlib.contextmanager
def recording(target: str | Topology | None) -> Iterator[Recording]:
    """:func:`capture`, with what only the package needs."""
    target = resolve(target)
    _C.flush()  # what is pending is not part of the block
    record = Recording(target)
    generators = [default_generator(index) for index in range(_C.device_count_bound())]
    states = [generator.get_state() for generator in generators]
    _C.begin_capture(target.platform, target.runs_here, target.num_devices, record)
    _captured.append(target)
    try:
        with xla_options.asking(target._check):
            yield record
        _C.flush()
    except BaseException:
        with contextlib.suppress(Exception):  # what is pending must not be run later
            _C.flush()
        raise
    finally:
        _captured.clear()
        _C.end_capture()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def resolve(target: str | Topology | None) -> Topology:
    """The topology of this name, or itself."""
    if isinstance(target, Topology):
        return target
    if target is not None and not isinstance(target, str):
        raise TypeError(f"a topology is given by its name or by aot.topology(), not {target!r}")
    return topologies.topology(target)
