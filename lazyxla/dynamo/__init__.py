"""The ``torch.compile(backend="lazyxla")`` backend.

Dynamo and AOTAutograd trace the function into FX graphs of ATen operators: one for inference, two
for training (forward and backward). Each graph becomes one node of the pending graph, so in lazy
mode a whole training step is still one program, without recording its operators again; in eager
mode each graph runs at once. What a graph writes in place (batch-norm statistics, a cache, a
compiled optimizer's parameters) is written by that node, too.

A graph with symbolic sizes gets one such node for each combination of sizes it is called with:
``symbolic_sizes.py``; or for each bucket of sizes that have bounds: ``padding/``. A graph that also
computes on other devices, or that has operators that only the host can run, gets a node for each
part between them: ``partition.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from lazyxla import _C, untraced
from lazyxla.determinant import transpose_for_determinants
from lazyxla.dynamo import assertions, attention, padding, shared_arguments
from lazyxla.dynamo.execution import compile_graph
from lazyxla.dynamo.flex_attention import inline_flex_attention
from lazyxla.dynamo.saved_tensors import partition_joint_graph
from lazyxla.dynamo.symbolic_sizes import MAX_SPECIALISATIONS, SizedGraph, has_symbols
from lazyxla.xla_options import Options, check_options

__all__ = ["MAX_SPECIALISATIONS", "backend"]

untraced.register_with_dynamo()

_MODES = (None, "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Options | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compiles what Dynamo traced. Called by ``torch.compile``, not by users.

    Args:
        module: the graph.
        inputs: examples of its inputs, as fake tensors and sizes.
        options: ``torch.compile``'s: options of XLA's compiler, by the names of its flags, with
            values of type bool, int, float or str.
        mode: ``torch.compile``'s. All modes are the same here: a graph is one compiled program.

    Raises:
        ValueError: XLA does not know an option or takes no such value for it; no such mode.
        TypeError: the options are no dict of such values.
    """
    from torch._dynamo.backends.common import aot_autograd

    if mode not in _MODES:
        known = ", ".join(repr(m) for m in _MODES if m)
        raise ValueError(f"lazyxla: torch.compile has no mode {mode!r}; it has {known}")
    checked = check_options(options, "torch.compile's options")
    compiler = partial(_compile, options=checked)
    aot = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=partial(_compile_backward, options=checked),
        # In training AOTAutograd itself makes the results that share memory.
        inference_compiler=partial(compiler, aliases=True),
        partition_fn=partition_joint_graph,
        decompositions={**attention.DECOMPOSITIONS, **assertions.decompositions(module)},
        keep_inference_input_mutations=True,
    )
    before = _C.trace_for_lazyxla(True)
    try:
        compiled: Callable[..., Any] = aot(module, inputs)
    finally:
        _C.trace_for_lazyxla(before)
    return shared_arguments.guarded(compiled, module, inputs)


def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Options, aliases: bool = False
) -> Callable[..., Any]:
    """One of AOTAutograd's graphs as a function of a list of arguments, which it empties.

    With `aliases`, results that are views of each other share their memory.
    """
    from functorch.compile import make_boxed_func

    inline_flex_attention(module)
    transpose_for_determinants(module.graph)
    if aliases:  # inference: no joint graph was there to decide for
        padding.plan(module.graph, aliases)
    if plan := padding.plan_of(module.graph):
        compiled: Any = padding.PaddedGraph.planned(module.graph, plan, options, aliases)
    elif has_symbols(module.graph):
        compiled = SizedGraph.of(module.graph, options, aliases)
    else:
        compiled = compile_graph(module.graph, options, aliases)
    if compiled is not None:
        return compiled
    # Nothing to compile, or sizes that depend on data: PyTorch runs the graph, and operators are
    # recorded one by one.
    module.recompile()
    return make_boxed_func(module)


def _compile_backward(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Options
) -> Callable[..., Any]:
    """The same for a backward graph, which can be called again (``retain_graph=True``).

    AOTAutograd refuses that where it believes that the graph uses the memory of saved tensors.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        reused = getattr(context.fw_metadata, "bw_donated_idxs", None)
        if reused:
            reused.clear()  # the forward's description has the same list
    return _compile(module, inputs, options=options)
