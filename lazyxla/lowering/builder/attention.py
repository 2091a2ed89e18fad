"""How a platform computes attention: what a builder says as `Builder.attention`.

The rules are in rules/attention.py; a kernel is a module in the platform's package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lazyxla.lowering.value import Operand, Value

if TYPE_CHECKING:
    from lazyxla.lowering.builder import Builder


class AttentionKernel(Protocol):
    """A kernel that computes the scores tile by tile and never writes them.

    Queries are of shape (N, H, S, D), keys and values (N, G, T, D), where H is a multiple of G.
    Their scores are multiplied by `factor`. `mask` broadcasts to (N, H, S, T): numbers to add to
    the scores, or bools that are true where a score remains. `dropped`, if it is not empty: which
    weights dropout leaves (N, H, S, T), and in float32 what these are multiplied with (N, H).
    """

    def suits(
        self, b: Builder, query: Value, key: Value, mask: Value | None, dropout: bool, /
    ) -> bool:
        """Whether it is for this attention."""

    def forward(
        self,
        b: Builder,
        query: Value,
        key: Value,
        value: Value,
        is_causal: bool,
        factor: Operand,
        mask: Value | None,
        dropped: Sequence[Value],
        /,
    ) -> tuple[Value, Value]:
        """The result (N, H, S, D), and the logarithm of each row's sum (N, H, S) in float32."""

    def backward(
        self,
        b: Builder,
        grad: Value,
        inputs: tuple[Value, ...],
        is_causal: bool,
        factor: Operand,
        mask: Value | None,
        dropped: Sequence[Value],
        /,
    ) -> tuple[Value, ...]:
        """The gradients of query, key and value; `inputs`: these, the result and the logarithms."""


class Attention(NamedTuple):
    """How a platform computes attention; the default is XLA's own operations."""

    kernel: AttentionKernel | None = None

    most_scores: int = 1 << 22
    """From this many scores on, attention is computed in blocks of rows
    (rules/attention_blocks.py)."""

    causal_loops: int = 1
    """In how many parts rows are taken if each sees only the columns up to its own: each is a loop
    over the columns that its last row sees."""
