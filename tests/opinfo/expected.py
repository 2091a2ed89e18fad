"""Failures that are known, each with its reason. A check that passes nevertheless is a failure.

Reasons are facts that were measured; a failure that nobody has looked into does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.opinfo.outcome import Outcome


@dataclass(frozen=True)
class Expected:
    """Of these entries, in these parts and dtypes, failures of one of these kinds.

    Unless `always`, the check may pass, depending on what ran before.
    """

    reason: str
    entries: tuple[str, ...]
    kinds: tuple[str, ...]
    parts: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = ("float32",)
    always: bool = True


_ALL = ("forward", "backward")

EXPECTED: tuple[Expected, ...] = (
    Expected(
        "PyTorch wants the indices on the CPU; those of the samples are on the device",
        ("tensor_split",),
        ("raises",),
        _ALL,
        ("float32", "int64", "bfloat16", "complex64", "bool"),
    ),
    Expected(
        "XLA has no complex32",
        ("chalf",),
        ("raises",),
        _ALL,
        ("float32", "int64", "bfloat16", "complex64", "bool"),
    ),
    Expected(
        "there are no sparse layouts on the device",
        ("to_sparse",),
        ("raises",),
        _ALL,
        ("float32", "int64", "bfloat16", "complex64", "bool"),
    ),
    Expected(
        "the strides are those of PyTorch's meta function, which differ from its CPU kernel's",
        (
            "fft.hfft2",
            "fft.hfftn",
            "fft.rfft2",
            "fft.rfftn",
            "linalg.eig",
            "linalg.lstsq",
            "linalg.lstsq.grad_oriented",
            "nonzero_static",
        ),
        ("strides",),
    ),
    Expected(
        "in inference PyTorch's CPU kernel gives empty statistics, its meta function (C,)",
        ("native_batch_norm", "_native_batch_norm_legit"),
        ("shape",),
    ),
    Expected(
        "PyTorch's meta function gives statistics in float32, its CPU kernel in bfloat16",
        (
            "_batch_norm_with_update",
            "_native_batch_norm_legit",
            "native_batch_norm",
            "native_layer_norm",
        ),
        ("dtype",),
        dtypes=("bfloat16",),
    ),
    Expected(
        "an index out of range is no error: see docs/semantics.md",
        ("gather", "scatter", "scatter_add"),
        ("accepts",),
        ("errors",),
    ),
    Expected(
        "PyTorch's CPU kernel checks the parameters, its meta function does not",
        (
            "as_strided_scatter",
            "aminmax",
            "multinomial",
            "nn.functional.conv1d",
            "nn.functional.conv2d",
            "nn.functional.conv3d",
            "uniform",
        ),
        ("accepts",),
        ("errors",),
    ),
    Expected(
        "a number is checked at the first call with the same shapes only, in this process or an "
        "earlier one: its value is not part of what shape inference remembers",
        ("cauchy", "exponential", "geometric", "log_normal"),
        ("accepts",),
        ("errors",),
        always=False,
    ),
    Expected(
        "gradient of a transposed convolution whose output padding is not less than its stride: "
        "the rule's result has an element too many",
        ("nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d"),
        ("raises",),
        ("backward",),
    ),
    Expected(
        "XLA's erf_inv errs by up to 5e-7, PyTorch's by 6e-8 of the value: exp(y * y) in the "
        "gradient makes it 5e-6 at -0.9987",
        ("erfinv",),
        ("values",),
        ("backward",),
    ),
    Expected(
        "native_batch_norm.out is lowered through its decomposition, which writes to an argument",
        ("native_batch_norm",),
        ("raises",),
        ("out",),
    ),
    Expected(
        "the first result of the out= form has the shape of a statistic",
        ("_native_batch_norm_legit",),
        ("shape",),
        ("out",),
    ),
    Expected(
        "equal elements: PyTorch may give the index of any of them",
        ("argsort", "kthvalue", "sort", "topk"),
        ("values",),
        dtypes=("int64", "bfloat16", "bool"),
    ),
    Expected(
        "imaginary parts differ by 2 pi: another branch of the logarithm",
        ("logcumsumexp",),
        ("values",),
        dtypes=("complex64",),
    ),
)


def expected(entry: str, dtype: str, part: str) -> list[Expected]:
    """What is known about a check."""
    return [e for e in EXPECTED if entry in e.entries and part in e.parts and dtype in e.dtypes]


def unexpected(outcome: Outcome, complete: bool) -> list[str]:
    """Failures that are not known, and known ones that do not happen any more.

    The latter only if the check was `complete`, that is, of all samples.
    """
    known = expected(outcome.entry, outcome.dtype, outcome.part)
    problems = [
        f"{outcome.entry} {outcome.part} sample {f['sample']}: {f['kind']}: {f['message']}"
        for f in outcome.failures
        if not any(f["kind"] in e.kinds for e in known)
    ]
    for e in known if complete else []:
        if e.always and not any(f["kind"] in e.kinds for f in outcome.failures):
            problems.append(
                f"{outcome.entry} {outcome.part} passes, but is expected to fail: {e.reason}"
            )
    return problems
