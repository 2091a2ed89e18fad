"""Recording programs without running them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lazyxla import _C
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.topologies import Options, Topology, topology
from lazyxla.lowering import Program
from lazyxla.random import default_generator


class CapturedProgram:
    """A program that :func:`capture` recorded.

    ``program`` is what is lowered, ``times`` how often the program came up: a training step that is
    recorded ten times is one program, after the first step or two.
    """

    def __init__(self, program: Program, options: Options, target: Topology, held: Any) -> None:
        self.program = program
        self.times = 1
        self._options = options
        self._target = target
        self._held = held  # what lowering it needs

    def compile(self, options: Options | None = None) -> CompiledProgram:
        """Compiles it; arguments and errors are those of :meth:`Topology.compile`."""
        return self._target.compile(self.program, {**self._options, **(options or {})})

    def __repr__(self) -> str:
        program = self.program
        return (
            f"CapturedProgram({len(program.nodes)} operators, {len(program.inputs)} inputs, "
            f"{len(program.outputs)} outputs, {self.times} times)"
        )


class Recording:
    """What a capture has recorded so far; C++ calls it at every flush."""

    def __init__(self, target: Topology) -> None:
        self.programs: list[CapturedProgram] = []
        self.sequence: list[CapturedProgram] = []  # one for each flush
        self._target = target

    def __call__(self, number: int, program: Program | None, options: Any, held: Any) -> None:
        if program is None:
            self.programs[number].times += 1
        else:
            self.programs.append(CapturedProgram(program, options, self._target, held))
        self.sequence.append(self.programs[number])


@contextlib.contextmanager
def capture(topology: str | Topology) -> Iterator[list[CapturedProgram]]:
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
    had before. So have random generators their state. What is not on the device, such as an
    optimizer's count of steps, is as the block left it.

    There is one capture at a time, and it is about all threads: while it is active, nobody's work
    on the device is run.

    Args:
        topology: what to compile for, or its name.

    Raises:
        RuntimeError: a capture is active already.
        ImportError, ValueError: see :func:`topology`.
    """
    with recording(topology) as record:
        yield record.programs


@contextlib.contextmanager
def recording(target: str | Topology) -> Iterator[Recording]:
    """:func:`capture`, with what only the package needs."""
    target = resolve(target)
    _C.sync(False, _C.Cause.MODE)  # what is pending is none of the block's
    record = Recording(target)
    generators = [default_generator(index) for index in range(_C.device_count_bound())]
    states = [generator.get_state() for generator in generators]
    _C.begin_capture(target.platform, record)
    try:
        yield record
        _C.sync(False, _C.Cause.MODE)
    except BaseException:
        with contextlib.suppress(Exception):  # what is pending must not be run later
            _C.sync(False, _C.Cause.MODE)
        raise
    finally:
        _C.end_capture()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def resolve(target: str | Topology) -> Topology:
    """The topology of this name, or itself."""
    if isinstance(target, Topology):
        return target
    if not isinstance(target, str):
        raise TypeError(f"a topology is given by its name or by aot.topology(), not {target!r}")
    return topology(target)
