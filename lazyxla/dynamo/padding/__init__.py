"""Sizes that vary within bounds: one program for each bucket of them.

Where the user gave a dimension bounds (``torch._dynamo.mark_dynamic(x, 0, min=2, max=64)``), its
size is rounded up to one of a few buckets, the tensors are padded, and the true size is an argument
of the program. The results are those of the exact sizes, because of three things:

- ``structure.py`` knows which elements of each tensor are true, through views and reshapes;
- ``analysis.py`` knows, by the rules of ``rules_*.py``, which operators would let true elements of
  the result depend on padding, and what has to fill the padding before. What has no rule, or does
  not meet its conditions, is refused: the graph is compiled for exact sizes as any other;
- ``rewriting.py`` writes the graph for a bucket, in which those operators see such values.

``plans.py`` finds the bounds, ``calls.py`` pads and cuts at each call.
"""

from lazyxla.dynamo.padding import (
    rules_elementwise,
    rules_indexing,
    rules_layers,
    rules_products,
    rules_reductions,
    rules_shapes,
)
from lazyxla.dynamo.padding.calls import PaddedGraph
from lazyxla.dynamo.padding.plans import Plan, hand_on, plan, plan_of

RULE_FILES = (
    rules_elementwise,
    rules_indexing,
    rules_layers,
    rules_products,
    rules_reductions,
    rules_shapes,
)
"""The modules that enter rules when they are imported."""

__all__ = ["RULE_FILES", "PaddedGraph", "Plan", "hand_on", "plan", "plan_of"]
