"""What the sweep (sweep.py) finds to be refused, each with its reason.

An operator that is listed and compiles nevertheless is a failure, too.
"""

from __future__ import annotations

_FFT = "XLA's TPU compiler has no Fourier transform of float64"

_COMPLEX_HALF = "torch.complex32"  # XLA has no such dtype

REFUSED: dict[tuple[str, str, str], str] = {
    ("tpu", "float64", "aten::_fft_c2c"): _FFT,
    ("tpu", "float64", "aten::_fft_r2c"): _FFT,
    ("tpu", "float64", "aten::_fft_c2r"): _FFT,
    ("cuda", "float16", "aten::complex"): _COMPLEX_HALF,
    ("tpu", "int64", "aten::convolution"): "XLA's TPU compiler has no convolution of int64",
}
"""(platform, dtype, operator) to a part of the message that says why."""
