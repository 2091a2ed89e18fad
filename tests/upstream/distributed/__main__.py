"""Runs PyTorch's tests for many processes: ``python -m tests.upstream.distributed``; see
`tests.upstream.command`.
"""

import sys
from functools import partial
from pathlib import Path

from tests.upstream.command import Suite, main
from tests.upstream.process import Worker

PROCESSES = 4
"""Of most tests, as of PyTorch's on a machine with so many GPUs."""

SUITE = Suite(
    files=(
        "test_functional_api",
        "test_device_mesh",
        "checkpoint/test_save_load_api",
        "checkpoint/test_dtensor_checkpoint",
        "checkpoint/test_dtensor_resharding",
    ),
    known_failures=Path(__file__).with_name("known_failures.txt"),
    results="distributed.jsonl",
    mode="eager",
    start=partial(Worker, module="tests.upstream.distributed.worker", devices=PROCESSES),
    folder="distributed",
)

if __name__ == "__main__":
    sys.exit(main(SUITE))
