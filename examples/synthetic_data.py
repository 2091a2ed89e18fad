"""Synthetic data that can be learned: text of a Markov chain, images of digits and of classes.

All of it is a function of the seed, so every device sees the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

Batches = Iterator[tuple[Tensor, Tensor]]


def markov_text(
    vocab: int, batch: int, length: int, *, successors: int = 4, seed: int = 0
) -> Batches:
    """Endless (tokens, next tokens), each (batch, length) int64, of one fixed Markov chain.

    After every token come ``successors`` others with equal probability, frequent tokens being
    successors of many. A model that has learned the chain has a loss of about ln(successors).
    """
    rng = np.random.default_rng(seed)
    frequency = 1.0 / np.arange(1, vocab + 1)
    table = rng.choice(vocab, size=(vocab, successors), p=frequency / frequency.sum())
    token = rng.integers(vocab, size=batch)
    while True:
        text = np.empty((batch, length + 1), dtype=np.int64)
        text[:, 0] = token
        for position in range(1, length + 1):
            token = table[token, rng.integers(successors, size=batch)]
            text[:, position] = token
        text_tensor = torch.from_numpy(text)
        yield text_tensor[:, :-1].contiguous(), text_tensor[:, 1:].contiguous()


# Digits as 3x5 pixels, one string per digit, rows from top to bottom.
_GLYPHS = (
    "111101101101111 010110010010111 111001111100111 111001111001111 101101111001001 "
    "111100111001111 111100111101111 111001010010010 111101111101111 111101111001111"
)


def digits(batch: int, *, noise: float = 0.3, seed: int = 0) -> Batches:
    """Endless (images, labels): (batch, 1, 28, 28) float32 and (batch,) int64 in 0..9.

    Each image shows its digit 3 to 5 times enlarged, at a random place, under noise.
    """
    glyphs = [np.array(list(g), dtype=np.float32).reshape(5, 3) for g in _GLYPHS.split()]
    scaled = {s: [np.kron(g, np.ones((s, s), np.float32)) for g in glyphs] for s in (3, 4, 5)}
    rng = np.random.default_rng(seed)
    while True:
        labels = rng.integers(10, size=batch)
        images = rng.normal(0.0, noise, size=(batch, 28, 28)).astype(np.float32)
        for image, label, scale in zip(images, labels, rng.integers(3, 6, size=batch)):
            glyph = scaled[int(scale)][label]
            top = rng.integers(28 - glyph.shape[0] + 1)
            left = rng.integers(28 - glyph.shape[1] + 1)
            image[top : top + glyph.shape[0], left : left + glyph.shape[1]] += glyph
        yield torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)


def coloured_waves(batch: int, size: int, classes: int, *, seed: int = 0) -> Batches:
    """Endless (images, labels): (batch, 3, size, size) float32 and (batch,) int64.

    Each class is a plane wave of its own direction and length, at a random phase, under noise.
    """
    rng = np.random.default_rng(seed)
    waves = rng.uniform(-0.8, 0.8, size=(classes, 3, 2))
    rows, columns = np.meshgrid(np.arange(size), np.arange(size), indexing="ij")
    while True:
        labels = rng.integers(classes, size=batch)
        phase = rng.uniform(0, 2 * np.pi, size=(batch, 1, 1, 1))
        step = waves[labels][..., None, None]
        images = np.sin(step[:, :, 0] * rows + step[:, :, 1] * columns + phase)
        images += rng.normal(0.0, 0.3, size=images.shape)
        yield torch.from_numpy(images.astype(np.float32)), torch.from_numpy(labels)
