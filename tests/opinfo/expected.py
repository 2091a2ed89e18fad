"""Failures that are known, each with its reason. A check that passes nevertheless is a failure.

Reasons are facts that were measured; a failure that nobody has looked into does not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.opinfo.outcome import INTEGERS, SIZES, VARIANTS, VIEWS, Outcome


@dataclass(frozen=True)
class Expected:
    """Of these entries, in these parts and dtypes, failures of one of these kinds.

    Unless `always`, the check may pass, depending on what ran before; of other layouts, sizes and
    integers any check may.
    """

    reason: str
    entries: tuple[str, ...]
    kinds: tuple[str, ...]
    parts: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = ("float32",)
    always: bool = True


_ALL = ("forward", "backward")
_DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "complex64"),
    *("int64", "int32", "uint8", "bool"),
)

EXPECTED: tuple[Expected, ...] = (
    Expected(
        "XLA has no complex32",
        ("chalf",),
        ("raises",),
        _ALL,
        _DTYPES,
    ),
    Expected(
        "XLA has no complex32",
        ("complex", "polar", "view_as_complex"),
        ("raises",),
        dtypes=("float16",),
    ),
    Expected(
        "PyTorch's CPU returns a part of a larger array, whose strides a result cannot have",
        ("linalg.lstsq", "linalg.lstsq.grad_oriented"),
        ("strides",),
        dtypes=_DTYPES,
        always=False,
    ),
    Expected(
        "in inference PyTorch's CPU kernel gives empty statistics, its meta function (C,)",
        ("native_batch_norm", "_native_batch_norm_legit"),
        ("shape",),
        ("forward", "out"),
        ("float32", "float64"),
    ),
    Expected(
        "PyTorch's meta function gives statistics in float32, its CPU kernel in 16 bits",
        (
            "_batch_norm_with_update",
            "_native_batch_norm_legit",
            "native_batch_norm",
            "native_layer_norm",
        ),
        ("dtype",),
        dtypes=("bfloat16", "float16"),
    ),
    Expected(
        "an index out of range is no error: see docs/semantics.md",
        ("gather", "scatter", "scatter_add"),
        ("accepts",),
        ("errors",),
    ),
    Expected(
        "PyTorch's CPU kernel reads the probabilities, which are data here",
        ("multinomial",),
        ("accepts",),
        ("errors",),
    ),
    Expected(
        "XLA's erf_inv errs by up to 5e-7, PyTorch's by 6e-8 of the value: exp(y * y) in the "
        "gradient makes it 5e-6 at -0.9987",
        ("erfinv",),
        ("values",),
        ("backward",),
    ),
    Expected(
        "PyTorch's CPU yields nan for the gradient of an infinity norm of complex numbers",
        ("renorm",),
        ("values",),
        ("backward",),
        ("complex64",),
    ),
    Expected(
        "the gradient of the weights is 0, of terms of up to 2e3: the device yields 0.0078",
        ("cov",),
        ("values",),
        ("backward",),
    ),
    Expected(
        "the weights are float32: of their gradient, the device yields 3.1e-5 for 0, and errs by "
        "1.5e-4 of 404 where PyTorch's CPU errs by 2.2e-4",
        ("cov",),
        ("values",),
        ("backward",),
        ("float64",),
    ),
    Expected(
        "of the weights' gradient, the device yields up to 9.8e-4 for 0, PyTorch's CPU 4.9e-4; "
        "elsewhere the device errs by 8.2e-7 of the largest element, PyTorch's CPU by 1.4e-6",
        ("cov",),
        ("values",),
        ("backward",),
        ("complex64",),
    ),
    Expected(
        "PyTorch's CPU computes the step between two elements in 16 bits; the device's elements "
        "are the exact ones, rounded once",
        ("linspace", "linspace.tensor_overload"),
        ("values",),
        dtypes=("bfloat16", "float16"),
    ),
    Expected(
        "PyTorch's Python code adds up in float32 on the devices that it knows, the CPU and CUDA, "
        "and in the type of the input on others",
        (
            "nn.functional.linear_cross_entropy.chunked",
            "nn.functional.linear_cross_entropy.chunked_none",
        ),
        ("values",),
        dtypes=("bfloat16", "float16"),
    ),
    Expected(
        "products that cancel are multiplied by weights: the device errs by 2.3e-5 of the largest "
        "element, PyTorch's CPU by 7.6e-6",
        ("nn.functional.multi_head_attention_forward",),
        ("values",),
    ),
    Expected(
        "with one dimension PyTorch's CPU does not fill a given result",
        ("fft.ihfft2", "fft.ihfftn"),
        ("values",),
        ("out",),
    ),
    Expected(
        "imaginary parts differ by 2 pi: another branch of the logarithm",
        ("logcumsumexp",),
        ("values",),
        _ALL,
        ("complex64",),
    ),
    # ---- results in a part of memory ----
    Expected(
        "PyTorch's CPU kernels write to a given result as if it were contiguous",
        ("narrow_copy", "nn.functional.avg_pool3d"),
        ("values",),
        (VIEWS,),
        _DTYPES,
    ),
    Expected(
        "of a vector PyTorch's CPU kernel resizes a given result twice, and its strides are lost",
        ("nn.functional.linear",),
        ("strides",),
        (VIEWS,),
        _DTYPES,
    ),
    # ---- sizes of 0 and 1, and extreme integers ----
    Expected(
        "indices, lengths, pivots and masks are data: see docs/semantics.md",
        (
            *("__getitem__", "gather", "scatter", "lu_solve", "lu_unpack", "linalg.lu_solve"),
            *("masked_scatter", "_segment_reduce.lengths", "repeat_interleave", "scatter_add"),
            *(f"scatter_reduce.{kind}" for kind in ("sum", "prod", "mean", "amin", "amax")),
            *(f"nn.functional.max_unpool{n}d" for n in (1, 2, 3)),
            *(f"nn.functional.max_unpool{n}d.grad" for n in (1, 2, 3)),
            "nn.functional.one_hot",
        ),
        ("accepts",),
        VARIANTS,
        ("float32", "int64"),
    ),
    Expected(
        "a matrix that is not positive definite is refused when the result is read",
        ("cholesky", "cholesky_inverse"),
        ("accepts",),
        (SIZES,),
    ),
    Expected(
        "without repeats PyTorch's CPU does not keep to output_size, its meta function does",
        ("repeat_interleave",),
        ("raises",),
        (SIZES,),
    ),
    Expected(
        "of no elements PyTorch's CPU kernel copies its argument, whatever the result's shape",
        ("addmv", "nn.functional.pixel_unshuffle"),
        ("shape",),
        (SIZES,),
    ),
    Expected(
        "PyTorch's CPU kernel refuses its own result, which its meta function makes",
        ("logsumexp",),
        ("accepts",),
        (SIZES,),
    ),
    Expected(
        "PyTorch's CPU returns memory that it has not written",
        (
            *("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss"),
            *("nn.functional.pad.circular", "grid_sampler_2d", "grid_sampler_3d"),
        ),
        ("values",),
        VARIANTS,
    ),
    Expected(
        "PyTorch's CPU repeats one row of an image of width 1 that lies as channels_last",
        ("_upsample_bilinear2d_aa",),
        ("values",),
        (SIZES,),
    ),
    Expected(
        "several elements for one place: the order is open",
        (
            *("nn.functional.max_unpool2d", "nn.functional.max_unpool2d.grad"),
            "nn.functional.max_unpool3d.grad",
        ),
        ("values",),
        (SIZES,),
    ),
    Expected(
        "a sum of products that cancel: the device errs by 1.5e-6 of the largest element",
        ("linalg.multi_dot",),
        ("values",),
        (SIZES,),
    ),
    # ---- extreme integers ----
    Expected(
        "PyTorch's CPU negates alpha as an int64: -2**63 stays what it is",
        ("sub", "rsub"),
        ("values",),
        (INTEGERS,),
    ),
    Expected(
        "of the order PyTorch's CPU kernel keeps the lowest 32 bits",
        (
            *(f"polygamma.polygamma_n_{n}" for n in range(5)),
            "special.polygamma.special_polygamma_n_0",
        ),
        ("values",),
        (INTEGERS,),
        ("float32", "int64"),
    ),
    Expected(
        "an offset of -2**63 overflows on the CPU, whose last places lie outside of the matrix",
        ("triu_indices",),
        ("shape",),
        (INTEGERS,),
        ("int64",),
    ),
    Expected(
        "windows below 1, of which PyTorch's CPU says that -inf is the greatest element",
        ("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d"),
        ("raises",),
        (INTEGERS,),
    ),
    Expected(
        "oneDNN, which the CPU's kernel calls, has no stride of 2**63 - 1",
        ("nn.functional.conv1d",),
        ("accepts",),
        (INTEGERS,),
    ),
    Expected(
        "XLA's CPU backend makes the padded operand: 103 GB for a dilation of 2**31",
        ("nn.functional.conv1d", "nn.functional.conv2d"),
        ("raises",),
        (INTEGERS,),
        ("float32", "int64"),
    ),
)


@dataclass(frozen=True)
class Judged:
    """These entries may have samples beyond the tolerances if the device is as exact as the CPU.

    See compare.as_exact, which measures both against the result in double precision.
    """

    reason: str
    entries: tuple[str, ...]
    parts: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = ("float32",)


# Errors are fractions of an output's largest element, the greatest among all samples.
_BACKWARD = ("backward",)
JUDGED: tuple[Judged, ...] = (
    Judged(
        "sums of products that cancel, in another order: the device errs by at most 3.0e-7, "
        "PyTorch's CPU by 3.3e-7",
        (
            *("addbmm", "baddbmm", "bmm", "cholesky_solve", "linalg.lu_solve", "linalg.multi_dot"),
            *("linalg.solve_triangular", "matmul", "mm", "nn.functional.bilinear"),
            *("nn.functional.conv1d", "nn.functional.conv_transpose3d"),
            "nn.functional.gaussian_nll_loss",
            "nn.functional.linear_cross_entropy",
            "nn.functional.linear_cross_entropy.chunked",
            "nn.functional.linear_cross_entropy.chunked_none",
            "nn.functional.poisson_nll_loss",
            "nn.functional.rms_norm",
        ),
        _BACKWARD,
    ),
    Judged(
        "two products, of which one is great: the device errs by 4.9e-8, PyTorch's CPU by 6.3e-8",
        ("baddbmm",),
        (INTEGERS,),
    ),
    Judged(
        "differences from a mean cancel: the device errs by 7.3e-6, PyTorch's CPU by 3.2e-6",
        (
            "_batch_norm_with_update",
            "_native_batch_norm_legit",
            "native_batch_norm",
            "nn.functional.batch_norm",
        ),
        _BACKWARD,
    ),
    Judged(
        "the variance of very few elements: the device errs by 0.16, PyTorch's CPU by 0.09",
        ("nn.functional.instance_norm",),
        _BACKWARD,
    ),
    Judged(
        "the softmax of scores that cancel: the device errs by 1.2e-5, PyTorch's CPU by 5.6e-6",
        ("nn.functional.scaled_dot_product_attention",),
        _BACKWARD,
    ),
    Judged(
        "weights of both signs cancel: the device errs by 2.9e-6, PyTorch's CPU by 3.1e-6",
        ("grid_sampler_2d", "nn.functional.grid_sample", "nn.functional.interpolate.bicubic"),
        _BACKWARD,
    ),
    Judged(
        "Fourier transforms in another order: the device errs by 5.3e-7, PyTorch's CPU by 2.7e-7",
        (
            *("fft.fft", "fft.fft2", "fft.hfft", "fft.hfft2", "fft.hfftn", "fft.rfft"),
            *("fft.rfft2", "stft"),
        ),
        _BACKWARD,
    ),
    Judged(
        "a Fourier transform in another order: the device errs by 9.2e-8, PyTorch's CPU by 8.6e-8",
        ("fft.hfft2",),
        ("forward", "out"),
    ),
    Judged(
        "matrix equations of bad condition: the device errs by 6.0e-6, PyTorch's CPU by 6.8e-6",
        ("linalg.householder_product", "linalg.lstsq", "linalg.lstsq.grad_oriented"),
        _BACKWARD,
    ),
    Judged(
        "PyTorch's CPU errs by 3.2e-6 near 1, the device by 5.7e-8",
        ("asin",),
        _BACKWARD,
    ),
    Judged(
        "sums of products that cancel, in another order: the device errs by at most 3.8e-7, "
        "PyTorch's CPU by 3.4e-7",
        (
            *("__rmatmul__", "bmm", "fft.hfft", "fft.hfftn"),
            *("linalg.lstsq", "linalg.lstsq.grad_oriented"),
            *("matmul", "nn.functional.conv1d", "nn.functional.conv2d"),
            *("nn.functional.conv_transpose1d", "nn.functional.conv_transpose3d"),
            *("nn.functional.normalize", "stft"),
        ),
        _BACKWARD,
        ("complex64",),
    ),
    Judged(
        "powers of large numbers, and a matrix of bad condition: the device errs by at most "
        "2.9e-6, PyTorch's CPU by 5.1e-6",
        ("__rpow__", "linalg.pinv.hermitian", "pow"),
        _BACKWARD,
        ("complex64",),
    ),
    Judged(
        "powers of large numbers: the device errs by at most 1.7e-6, PyTorch's CPU by 2.6e-6",
        ("__rpow__", "pow"),
        dtypes=("complex64",),
    ),
    Judged(
        "sums of products in another order: the device errs by 1.6e-7, PyTorch's CPU by 1.7e-7",
        ("fft.hfft2", "nn.functional.conv2d"),
        dtypes=("complex64",),
    ),
    Judged(
        "a gradient of 0 whose terms cancel: the device errs 1.3 times as much as PyTorch's CPU",
        ("nn.functional.rms_norm",),
        _BACKWARD,
        ("complex64",),
    ),
    Judged(
        "PyTorch's CPU rounds what lies between to 16 bits, the device only the result: it errs by "
        "at most twice as much, mostly by less",
        (
            *("_unsafe_masked_index_put_accumulate", "addr", "cross", "div.trunc_rounding"),
            *("histc", "index_reduce.mean", "linalg.cross", "log_softmax", "masked.log_softmax"),
            "masked.logsumexp",
            "nn.functional.adaptive_avg_pool3d",
            "nn.functional.batch_norm",
            "nn.functional.binary_cross_entropy_with_logits",
            "nn.functional.conv_transpose2d",
            "nn.functional.conv_transpose3d",
            "nn.functional.instance_norm",
            "nn.functional.interpolate.area",
            "nn.functional.interpolate.bicubic",
            "nn.functional.interpolate.linear",
            "nn.functional.interpolate.trilinear",
            "nn.functional.nll_loss",
        ),
        dtypes=("bfloat16", "float16"),
    ),
    Judged(
        "as before, in bfloat16 only",
        (
            *("_segment_reduce.lengths", "_segment_reduce.offsets"),
            *("grid_sampler_2d", "grid_sampler_3d", "linalg.vecdot"),
            "nn.functional.cosine_similarity",
            "nn.functional.embedding_bag",
            "nn.functional.gaussian_nll_loss",
            "nn.functional.grid_sample",
        ),
        dtypes=("bfloat16",),
    ),
    Judged(
        "as before, in float16 only",
        (
            *("add", "addbmm", "index_reduce.prod", "nn.functional.conv_transpose1d"),
            *("nn.functional.linear_cross_entropy", "nn.functional.mse_loss"),
            *("nn.functional.soft_margin_loss", "sub"),
        ),
        dtypes=("float16",),
    ),
    Judged(
        "a sum of losses that cancel: the device errs by 1.5e-2, PyTorch's CPU by 3.7e-3",
        ("nn.functional.triplet_margin_loss", "nn.functional.triplet_margin_with_distance_loss"),
        dtypes=("bfloat16",),
    ),
    Judged(
        "PyTorch's CPU errs by 7.6e-5, the device by 8.6e-6",
        ("nn.functional.ctc_loss",),
        _BACKWARD,
    ),
)


def judged_in_double(entry: str, dtype: str, part: str) -> list[Judged]:
    """Why samples of a check may be judged by double precision, or nothing."""
    return [j for j in JUDGED if entry in j.entries and _of(part, j.parts) and dtype in j.dtypes]


def expected(entry: str, dtype: str, part: str) -> list[Expected]:
    """What is known about a check."""
    return [e for e in EXPECTED if entry in e.entries and _of(part, e.parts) and dtype in e.dtypes]


def _of(part: str, parts: tuple[str, ...]) -> bool:
    """What is known of forward samples holds for those in other layouts and their variants, too."""
    return part in parts or (part in ("layouts", VIEWS, *VARIANTS) and "forward" in parts)


def unexpected(outcome: Outcome, complete: bool) -> list[str]:
    """Failures that are not known, and known ones that do not happen any more.

    The latter only if the check was `complete`, that is, of all samples. A check that needs no
    judgement in double precision is no such problem: whose roundings add up depends on the
    processor.
    """
    # The forward part tells what passes now.
    complete = complete and outcome.part not in ("layouts", VIEWS, *VARIANTS)
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
