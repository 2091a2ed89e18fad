"""What checking one entry gives; plain data, so that a worker process can send it as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PARTS = ("forward", "backward", "inplace", "out", "errors", "layouts")

# Samples with sizes of 0 and 1, and with extreme integers: many more than the others are. Only if
# asked for.
SIZES, INTEGERS = "sizes", "integers"
VARIANTS = (SIZES, INTEGERS)

# Operands, results and what is written are views of memory that the program makes. Only if asked
# for, too.
VIEWS = "views"


class Mismatch(Exception):
    """The device's result is not the CPU's.

    `kind` is one of values, dtype, shape, strides, device, structure, raises, accepts, words. These
    three are an error that only the device, or only the CPU, raises, and one in other words.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Outcome:
    """Of one entry, dtype and part. No samples and no failures: there was nothing to check."""

    entry: str
    dtype: str
    part: str
    samples: int = 0
    # Samples beyond the tolerances, but as near to the result in double precision as the CPU is.
    as_exact: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    # Only so many samples of the entry were tried, the first ones. None: all of them.
    limit: int | None = None

    def fail(self, kind: str, message: str, sample: int | None = None) -> None:
        """Notes a failure; `sample` is the number of the sample that failed."""
        self.failures.append({"kind": kind, "sample": sample, "message": message[:600]})

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures

    @property
    def crashed(self) -> bool:
        """Whether the worker process died or had to be stopped."""
        return any(f["kind"] in ("crash", "timeout") for f in self.failures)

    def as_json(self) -> dict[str, Any]:
        """The fields, for `Outcome(**fields)`."""
        return asdict(self)
