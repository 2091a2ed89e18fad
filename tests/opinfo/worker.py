"""A worker process of the sweep: one task per line of its input, one outcome per line.

Operators may print, so the outcomes go to the original standard output, and everything else that
is printed to the standard error.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from tests.opinfo.checks import check_entry


def main() -> None:
    outcomes = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        task = json.loads(line)
        dtype = getattr(torch, task["dtype"])
        outcome = check_entry(task["entry"], dtype, task["part"], task["limit"])
        print(json.dumps(outcome.as_json()), file=outcomes, flush=True)


if __name__ == "__main__":
    main()
