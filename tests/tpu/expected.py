"""What the sweep (sweep.py) finds to be refused, each with its reason.

An operator that is listed and compiles nevertheless is a failure, too.
"""

from __future__ import annotations

_FFT = "XLA's TPU compiler has no Fourier transform of float64"

REFUSED: dict[tuple[str, str], str] = {
    ("float64", "aten::_fft_c2c"): _FFT,
    ("float64", "aten::_fft_r2c"): _FFT,
    ("float64", "aten::_fft_c2r"): _FFT,
    ("int64", "aten::convolution"): "XLA's TPU compiler has no convolution of int64",
}
"""(dtype, operator) to a part of the message that says why."""
