"""Generates text with transformers' generate(), and counts what is compiled on the way.

The model has random weights, so the text means nothing. With a static cache the model is compiled
for the prompt and twice for a token, and never again for prompts that fit into the cache. With the
default cache, which grows, it is compiled for every token; lazyxla warns of that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torchvision_import import import_torchvision

import lazyxla

import_torchvision()  # transformers imports it if it is installed


@dataclass
class Prompt:
    """One call of generate(): the counts are of the programs that it compiled and ran."""

    tokens: list[int]
    seconds: float
    compiles: int
    executions: int
    graphs_cut: int


def make_model(device: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None  # every prompt gets as many tokens
    return model.to(device)


def main(argv: Sequence[str] | None = None) -> list[Prompt]:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="lazyxla", help="lazyxla or cpu (default: lazyxla)")
    options.add_argument("--cache", choices=("static", "dynamic"), default="static")
    options.add_argument("--sample", action="store_true", help="draw tokens, not the likeliest")
    options.add_argument("--tokens", type=int, default=64, help="new tokens for each prompt")
    options.add_argument(
        "--prompts", type=int, nargs="+", default=[16, 16, 12], help="lengths of the prompts"
    )
    args = options.parse_args(argv)

    model = make_model(args.device)
    generator = torch.Generator().manual_seed(1)
    done = []
    for number, length in enumerate(args.prompts):
        ids = torch.randint(1, 1024, (1, length), generator=generator).to(args.device)
        before, begin = lazyxla.counters(), time.perf_counter()
        text = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=args.tokens,
            do_sample=args.sample,
            **({"cache_implementation": "static"} if args.cache == "static" else {}),
        ).cpu()
        seconds, after = time.perf_counter() - begin, lazyxla.counters()
        names = ("compiles", "executions", "graphs_cut")
        counts = {name: after[name] - before[name] for name in names}
        done.append(Prompt(text[0].tolist(), seconds, **counts))
        print(
            f"prompt {number} of {length}: {args.tokens} tokens in {seconds:.2f} s, "
            f"{counts['compiles']} compiles, {counts['executions']} executions"
        )
    return done


if __name__ == "__main__":
    main()
