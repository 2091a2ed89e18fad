"""All cases, by name."""

from tests.distributed import (  # noqa: F401 - they have the cases
    arguments,
    batch_norm,
    checkpoints,
    collectives,
    pipelines,
    random_collectives,
    ranks_apart,
    training,
    wrappers,
)
from tests.distributed.cases import CASES as CASES
