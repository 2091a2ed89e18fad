"""Runs PyTorch's tests for many processes: ``python -m tests.upstream.distributed``; see
`tests.upstream.command`. With ``--spanning``, where the client spans the processes.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.spanning import plugin_path
from tests.upstream.command import Suite, main
from tests.upstream.distributed.names import DEVICES
from tests.upstream.process import Worker

SUITE = Suite(
    files=(
        "test_functional_api",
        "test_device_mesh",
        "_tensor/test_api",
        "_tensor/test_common_rules",
        "_tensor/test_dtensor",
        "_tensor/test_embedding_ops",
        "_tensor/test_experimental_ops",
        "_tensor/test_init",
        "_tensor/test_math_ops",
        "_tensor/test_matrix_ops",
        "_tensor/test_optimizers",
        "_tensor/test_pointwise_ops",
        "_tensor/test_random_ops",
        "_tensor/test_redistribute",
        "_tensor/test_tensor_ops",
        "_tensor/test_utils",
        "_tensor/test_view_ops",
        "tensor/parallel/test_parallelize_api",
        "tensor/parallel/test_tp_examples",
        "tensor/parallel/test_tp_random_state",
        "tensor/parallel/test_tp_style",
        "_composable/fsdp/test_fully_shard_autograd",
        "_composable/fsdp/test_fully_shard_clip_grad_norm_",
        "_composable/fsdp/test_fully_shard_comm",
        "_composable/fsdp/test_fully_shard_frozen",
        "_composable/fsdp/test_fully_shard_mixed_precision",
        "_composable/fsdp/test_fully_shard_state_dict",
        "_composable/fsdp/test_fully_shard_training",
        "checkpoint/test_save_load_api",
        "checkpoint/test_dtensor_checkpoint",
        "checkpoint/test_dtensor_resharding",
    ),
    known_failures=Path(__file__).with_name("known_failures.txt"),
    results="distributed.jsonl",
    mode="eager",
    start=partial(Worker, module="tests.upstream.distributed.worker", devices=DEVICES),
    folder="distributed",
)

SPANNING = replace(
    SUITE,
    results="distributed_spanning.jsonl",
    start=partial(SUITE.start, devices=1, plugin=plugin_path),
)
"""The same where the client spans the processes, each of which has one device."""

if __name__ == "__main__":
    sys.exit(main(SUITE, spanning=SPANNING))
