"""Errors of padding to few sizes: batches and arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from lazyxla import Buckets, bucket


class Text(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


TOKENS = {"x": torch.ones(2, 3), "y": torch.ones(2, 3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("batch", "arguments", "message"),
    [
        (
            {"x": torch.ones(2, 3), "y": torch.ones(2, 4), "z": torch.ones(9, 3)},
            {"dims": 1, "sizes": [4]},
            r"tensors of a batch differ in the size of dimension 1: "
            r"3 of batch\['x'\] and batch\['z'\], 4 of batch\['y'\]\. If they may, leave",
        ),
        (
            Text(torch.ones(2, 300), torch.ones(2)),
            {"dims": (0, 1), "sizes": {0: [4], 1: [256, 64]}},
            r"dimension 1 of batch\.tokens has size 300, more than the greatest bucket of "
            r"\[64, 256\]",
        ),
        (
            [torch.ones(2), torch.tensor(1)],
            {"dims": (0, 1), "sizes": [4]},
            r"no tensor to be padded has dimension 1; "
            r"the batch has batch\[0\] of shape \[2\], batch\[1\] of shape \[\]",
        ),
        (["text"], {"dims": 0, "sizes": [4]}, "has dimension 0; the batch has no tensors"),
        (
            torch.ones(2, 3),
            {"dims": (1, -1), "sizes": [4]},
            r"batch of shape \[2, 3\] has one of the dims twice: \(1, -1\)",
        ),
        (
            TOKENS,
            {"dims": {"x": 0, "z": 0}, "sizes": [4]},
            r"dims has a key \['z'\] that no tensor has; the batch has batch\['x'\], batch\['y'\]",
        ),
        (
            TOKENS,
            {"dims": 0, "sizes": [4], "value": {"x": {0: 1}}},
            r"value has a key \['x'\]\[0\] that no tensor has",
        ),
        (
            torch.ones(2),
            {"dims": 0, "sizes": [4], "value": {0: 1}},
            r"value has a key \[0\] that no tensor has; the batch has batch",
        ),
        (
            TOKENS,
            {"dims": 0, "sizes": [4], "value": 0.5},
            r"value 0.5 of batch\['y'\] does not fit",
        ),
        (
            torch.ones(2, dtype=torch.uint8),
            {"dims": 0, "sizes": [2], "value": -100},
            "value -100 of batch does not fit torch.uint8",
        ),
        (torch.ones(2) > 0, {"dims": 0, "sizes": [4], "value": 2}, "does not fit torch.bool"),
        (torch.ones(2), {"dims": 0, "sizes": [4], "value": 1j}, "1j of batch does not fit"),
        (torch.ones(2), {"dims": 0, "sizes": [4], "value": 10**400}, "does not fit torch.float32"),
        (torch.ones(2).int(), {"dims": 0, "sizes": [4], "value": -(10**400)}, "does not fit"),
        (
            torch.ones(2, dtype=torch.complex64),
            {"dims": 0, "sizes": [4], "value": 1e300j},
            "does not fit torch.complex64",
        ),
        (torch.ones(2).half(), {"dims": 0, "sizes": [4], "value": 1e6}, "does not fit torch.float"),
        (
            torch.ones(2).int(),
            {"dims": 0, "sizes": [4], "value": float("nan")},
            "value nan of batch does not fit torch.int32",
        ),
    ],
)
def test_errors_of_batches(batch: Any, arguments: dict[str, Any], message: str) -> None:
    buckets = Buckets(**arguments)
    for call in (lambda: buckets(batch), lambda: bucket(batch, **arguments)):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dims": 0.5}, TypeError, "dims must be integers, got float"),
        ({"dims": "x"}, TypeError, "dims must be a sequence of integers, got str"),
        ({"dims": (0, True)}, TypeError, "dims must be integers, got bool"),
        ({"dims": {"x": None}}, TypeError, "dims must be integers, got NoneType"),
        ({"dims": ()}, ValueError, r"dims must be different dimensions, at least one, got \(\)"),
        ({"dims": (1, 1)}, ValueError, r"at least one, got \(1, 1\)"),
        ({"dims": {}}, ValueError, "at least one dimension, got an empty mapping"),
        ({"sizes": 64}, TypeError, "sizes must be a sequence of integers, got int"),
        ({"sizes": "64"}, TypeError, "sizes must be a sequence of integers, got str"),
        ({"sizes": [64.0]}, TypeError, "sizes must be integers, got float"),
        ({"sizes": []}, ValueError, r"sizes must be positive, at least one, got \[\]"),
        ({"sizes": [8, 0]}, ValueError, r"sizes must be positive, at least one, got \[0, 8\]"),
        ({"sizes": {0: [8], 1: 8}, "dims": (0, 1)}, TypeError, "a sequence of integers, got int"),
        (
            {"sizes": {0: [8]}, "dims": (0, 1)},
            ValueError,
            r"buckets for each of the dims, \[0, 1\], and no others; got \[0\]",
        ),
        ({"sizes": {0: [8], 1: [8]}}, ValueError, r"each of the dims, \[0\], and no others"),
        ({"value": "0"}, TypeError, "value must be a number, got str"),
        ({"value": {"x": None}}, TypeError, "value must be a number, got NoneType"),
    ],
)
def test_errors_of_arguments(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Buckets(**{"dims": 0, "sizes": [4], **arguments})
