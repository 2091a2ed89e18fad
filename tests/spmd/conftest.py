"""Where the cases run in several processes (tests/test_spmd.py), their devices start together."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

import lazyxla  # noqa: F401

if "WORLD_SIZE" in os.environ:
    dist.init_process_group("lazyxla", timeout=timedelta(seconds=120))
