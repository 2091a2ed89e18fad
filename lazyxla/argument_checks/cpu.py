"""For which operators the CPU's kernel is called."""

from __future__ import annotations


def _names(text: str) -> list[str]:
    return [f"aten::{name}" for name in text.split()]


ON_CPU = {
    0: _names(
        "mm bmm addmm baddbmm mv dot addr linear _softmax _log_softmax nll_loss_forward "
        "nll_loss2d_forward multilabel_margin_loss_forward sort sort.stable max min amax amin "
        "max.dim min.dim aminmax argmax argmin mode sum sum.dim_IntList mean.dim logcumsumexp all "
        "all.dim all.dims any any.dim any.dims gather index_select index_add index_copy "
        "index_reduce index_fill.int_Tensor scatter_add masked_scatter bucketize.Tensor complex "
        "polar uniform normal_functional normal.Tensor_float normal.float_Tensor "
        "normal.Tensor_Tensor random random.from random.to binomial poisson bernoulli "
        "bernoulli.Tensor bernoulli.p"
    ),
    1: _names("floor_divide floor_divide.Scalar rsub.Tensor rsub.Scalar"),
}
"""Operators whose checks do not depend on sizes, so that one element suffices for the CPU's kernel:
by the value of that element. Pointwise operators may divide by it, others index with it. (Those
that PyTorch tags as pointwise are asked with 1.)"""

NUMBERS = _names(
    # Parameters of distributions.
    "cauchy exponential geometric log_normal uniform normal_functional normal.Tensor_float"
    " bernoulli.p native_dropout random.from random.to"
    # Values to be stored, which a dtype may be too narrow for.
    " full scalar_tensor linspace logspace fill.Scalar constant_pad_nd full_like new_full"
    " fill_diagonal masked_fill.Scalar index_fill.int_Scalar scatter.value"
    # Norms, and parameters of functions.
    " renorm _cdist_forward linalg_vector_norm norm.ScalarOpt_dim huber_loss smooth_l1_loss"
    " softshrink histc celu"
    # From the result alone the gradient is not known if the slope is negative.
    " elu_backward leaky_relu_backward rrelu_with_noise_backward"
)
"""Operators whose kernels have conditions on their numbers, for all dtypes. The pointwise ones
among the others have conditions for integers only, which cannot hold every number, be divided by
zero or raised to a negative power."""

NOT_ON_CPU = _names("_fft_c2c _fft_c2r _fft_r2c")
"""Operators whose meta functions refuse all dtypes that the kernel refuses: it is not asked. These
kernels would transform all of the sizes, and for some the ones of MKL in PyTorch 2.13 write beyond
their memory (`torch.fft.irfftn` of complex64 [5, 240, 7])."""
