"""The builder that lowering rules write HLO with.

A `Builder` is StableHLO plus what every rule would repeat: torch dtypes and shapes of values,
constants, conversion with PyTorch's semantics, type promotion, broadcasting, reductions,
contractions, indexing. Rules reach the plain operations as `b.hlo.add(x, y)`; `b.chlo` has the
special functions that StableHLO lacks (erf, lgamma, ...).
"""

from __future__ import annotations

from lazyxla.lowering.builder.builder import Apply, Builder

__all__ = ["Apply", "Builder"]
