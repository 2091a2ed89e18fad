"""docs/operators.md is what tests/operator_table.py makes of the operators as they are."""

from __future__ import annotations

import pytest
import torch

from lazyxla.lowering import check_lowering, how
from lazyxla.lowering.operators import find_op
from lazyxla.lowering.samples import sample
from tests.operator_table import FILE, operators, table


@pytest.mark.generated_file
def test_docs_are_up_to_date() -> None:
    # Each version of torch has other operators.
    text = FILE.read_text()
    version = ".".join(torch.__version__.split(".")[:2])
    if f"for torch {version}." not in text:
        return
    made, written = set(table().splitlines()), set(text.splitlines())
    assert made == written, (
        "docs/operators.md is not up to date; `make docs` (or python -m tests.operator_table) "
        "writes it anew. Lines that differ:\n"
        + "\n".join([f"- {line}" for line in sorted(written - made)])
        + "\n"
        + "\n".join([f"+ {line}" for line in sorted(made - written)])
    )


def test_rules_are_for_all_platforms() -> None:
    """What the page says of cuda and tpu: a call that is lowered for the CPU is for these, too."""
    differ = []
    for name in operators():
        call = sample(find_op(name), torch.float32) if how(name) in ("rule", "jax") else None
        if call is None or check_lowering(call.program(), "cpu") == "host":
            continue
        differ += [
            (name, p) for p in ("cuda", "tpu") if check_lowering(call.program(), p) != "device"
        ]
    assert not differ
