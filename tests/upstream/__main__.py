"""Runs PyTorch's own device tests on the device: ``python -m tests.upstream``; see `command`."""

import sys

from tests.upstream.command import Suite, main
from tests.upstream.known import KNOWN_FAILURES
from tests.upstream.process import Worker

SUITE = Suite(
    files=(
        "test_view_ops",
        "test_indexing",
        "test_shape_ops",
        "test_type_promotion",
        "test_sort_and_select",
        "test_tensor_creation_ops",
        "test_scatter_gather_ops",
        "test_reductions",
        "test_torch",
        "test_nn",
        "test_transformers",
        "test_maskedtensor",
    ),
    known_failures=KNOWN_FAILURES,
    results="results.jsonl",
    mode="eager",
    start=Worker,
)

if __name__ == "__main__":
    sys.exit(main(SUITE))
