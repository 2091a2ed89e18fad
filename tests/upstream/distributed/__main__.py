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
        "_tensor/test_api",
        "_tensor/test_common_rules",
        "_tensor/test_convolution_ops",
        "_tensor/test_dtensor",
        "_tensor/test_embedding_ops",
        "_tensor/test_experimental_ops",
        "_tensor/test_init",
        "_tensor/test_math_ops",
        "_tensor/test_matrix_ops",
        "_tensor/test_op_strategy",
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
        "_composable/fsdp/test_fully_shard_extensions",
        "_composable/fsdp/test_fully_shard_frozen",
        "_composable/fsdp/test_fully_shard_grad_scaler",
        "_composable/fsdp/test_fully_shard_init",
        "_composable/fsdp/test_fully_shard_mixed_precision",
        "_composable/fsdp/test_fully_shard_state",
        "_composable/fsdp/test_fully_shard_state_dict",
        "_composable/fsdp/test_fully_shard_training",
        "test_c10d_object_collectives",
        "test_device_mesh",
        "test_functional_api",
        "test_multi_threaded_pg",
        "checkpoint/test_checkpoint",
        "checkpoint/test_dtensor_checkpoint",
        "checkpoint/test_dtensor_resharding",
        "checkpoint/test_file_system_checkpoint",
        "checkpoint/test_format_utils",
        "checkpoint/test_hsdp_checkpoint",
        "checkpoint/test_planner",
        "checkpoint/test_save_load_api",
        "checkpoint/test_state_dict",
        "checkpoint/test_state_dict_utils",
        "checkpoint/test_tp_checkpoint",
        "checkpoint/fsdp/test_fsdp_dsd",
        "checkpoint/e2e/test_e2e_save_and_load",
        "checkpoint/e2e/test_fine_tuning",
    ),
    known_failures=Path(__file__).with_name("known_failures.txt"),
    results="distributed.jsonl",
    mode="eager",
    start=partial(Worker, module="tests.upstream.distributed.worker", devices=PROCESSES),
    folder="distributed",
)

if __name__ == "__main__":
    sys.exit(main(SUITE))
