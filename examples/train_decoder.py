"""Trains a decoder-only transformer on the text of a Markov chain.

The default is a model for an accelerator; ``--small`` is for the CPU and takes about a minute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from decoder_model import SMALL, Decoder, DecoderConfig, next_token_loss
from synthetic_data import markov_text
from trainer import Summary, parser, train


def main(argv: Sequence[str] | None = None) -> Summary:
    options = parser(__doc__.splitlines()[0], steps=200, lr=2e-3, optimizer="adam")
    options.add_argument("--small", action="store_true", help="a small model, batch 4 x 128")
    options.add_argument("--length", type=int, help="tokens per example")
    options.add_argument("--vocab", type=int, help="number of different tokens")
    args = options.parse_args(argv)

    config = SMALL if args.small else DecoderConfig()
    config = dataclasses.replace(
        config, vocab=args.vocab or config.vocab, max_length=args.length or config.max_length
    )
    batch = args.batch or (4 if args.small else 16)

    torch.manual_seed(args.seed)
    model = Decoder(config).to(args.device)
    return train(
        args,
        model,
        next_token_loss,
        markov_text(config.vocab, batch, config.max_length, seed=args.seed),
        unit="tokens",
        units_per_step=batch * config.max_length,
    )


if __name__ == "__main__":
    main()
