"""Compiling for TPUs and GPUs that are not attached: will it fit, and how fast will it be.

    report = lazyxla.aot.compile(model, (x,), topology="v5e:2x2")
    print(report)                    # memory, FLOPs, and the compiler's estimate of the time

    with lazyxla.aot.capture("v5e:2x2") as programs:
        train()                      # any program for the device "lazyxla"; nothing is run
    print(programs[-1].compile())

A program is recorded as always, on tensors that have no data, and compiled by the compiler that the
devices are run with: libtpu, ``pip install 'lazyxla[tpu]'``, or CUDA's plugin, ``pip install
'lazyxla[cuda]'``. It accepts the same programs there, and the memory it reports is what a device
will need. Nothing is executed or allocated, so models may be larger than the machine.

With a mesh the program is partitioned over all devices of a topology; the report then has the
collectives, too. :func:`search` tries several meshes::

    print(lazyxla.aot.compile(model, (x,), topology="v5p:4x4x4", mesh=((64,), ("data",)),
                              shardings=lazyxla.fully_shard, input_spec=("data",)))

What was compiled can be kept where the processes that run it look for it
(:meth:`CapturedProgram.store`, ``python -m lazyxla.aot``): their first step compiles nothing.
"""

from lazyxla.aot.capturing import CapturedProgram, capture
from lazyxla.aot.compiled import CompiledProgram
from lazyxla.aot.compiling import compile
from lazyxla.aot.searching import Plan, Ranking, search
from lazyxla.aot.topologies import Topology, topology

__all__ = [
    "CapturedProgram",
    "CompiledProgram",
    "Plan",
    "Ranking",
    "Topology",
    "capture",
    "compile",
    "search",
    "topology",
]
