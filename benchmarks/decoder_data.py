"""Sizes, first weights and batches of the decoder benchmark, as NumPy arrays for every side.

The sizes are those of ``python examples/train_decoder.py --small``.
"""

from __future__ import annotations

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 256, 2, 8, 4, 1024, 2048
HEAD_DIM = HIDDEN // HEADS
BATCH, LENGTH = 4, 128
EPS, ROTARY_BASE = 1e-6, 10000.0
LEARNING_RATE = 1e-3

# Steps before measuring (they compile), then so many blocks of so many steps.
WARM_UP, BLOCKS, STEPS = 3, 6, 10


def weights() -> dict[str, np.ndarray]:
    """Named as in the state dict of examples/decoder_model.py; matrices are (out, in)."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) * columns**-0.5).astype(np.float32)

    state = {"embedding.weight": matrix(VOCAB, HIDDEN)}
    for i in range(LAYERS):
        state |= {
            f"layers.{i}.attention_norm.weight": np.ones(HIDDEN, np.float32),
            f"layers.{i}.attention.query.weight": matrix(HIDDEN, HIDDEN),
            f"layers.{i}.attention.key.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.attention.value.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"layers.{i}.attention.out.weight": matrix(HIDDEN, HIDDEN),
            f"layers.{i}.feed_forward_norm.weight": np.ones(HIDDEN, np.float32),
            f"layers.{i}.feed_forward.gate.weight": matrix(INTERMEDIATE, HIDDEN),
            f"layers.{i}.feed_forward.up.weight": matrix(INTERMEDIATE, HIDDEN),
            f"layers.{i}.feed_forward.down.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return state | {
        "norm.weight": np.ones(HIDDEN, np.float32),
        "head.weight": matrix(VOCAB, HIDDEN),
    }


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    """Four (tokens, next tokens), each (BATCH, LENGTH), to be used in turn."""
    text = np.random.default_rng(1).integers(VOCAB, size=(4, BATCH, LENGTH + 1))
    return [(t[:, :-1].copy(), t[:, 1:].copy()) for t in text]
