"""What the sweep (sweep.py) leaves out or finds to be refused, each with its reason.

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

NO_CALL = frozenset(
    (
        "aten::__lshift__.Scalar",
        "aten::__lshift__.Tensor",
        "aten::__rshift__.Scalar",
        "aten::__rshift__.Tensor",
        "aten::_add_relu.Scalar",
        "aten::_aminmax",
        "aten::_aminmax.dim",
        "aten::_batch_norm_no_update",
        "aten::_batch_norm_with_update_functional",
        "aten::_embedding_bag_dense_backward",
        "aten::_embedding_bag_forward_only",
        "aten::_foreach_addcdiv.Tensor",
        "aten::_foreach_addcmul.Tensor",
        "aten::_fused_adagrad",
        "aten::_fused_adagrad.tensor_lr",
        "aten::_fused_adam",
        "aten::_fused_adam.tensor_lr",
        "aten::_fused_adamw",
        "aten::_fused_adamw.tensor_lr",
        "aten::_fused_sgd.tensor_lr",
        "aten::_int_mm",
        "aten::_is_all_true",
        "aten::_is_any_true",
        "aten::_logcumsumexp",
        "aten::_native_batch_norm_legit_functional",
        "aten::_native_batch_norm_legit_no_training",
        "aten::_native_multi_head_attention",
        "aten::_thnn_fused_gru_cell",
        "aten::_thnn_fused_gru_cell_backward",
        "aten::_thnn_fused_lstm_cell",
        "aten::_transformer_encoder_layer_fwd",
        "aten::_upsample_bicubic2d_aa_backward",
        "aten::_weight_norm_interface",
        "aten::_weight_norm_interface_backward",
        "aten::baddbmm.dtype",
        "aten::batch_norm_backward",
        "aten::bitwise_and.Scalar",
        "aten::bitwise_and.Scalar_Tensor",
        "aten::bitwise_or.Scalar",
        "aten::bitwise_or.Scalar_Tensor",
        "aten::bitwise_xor.Scalar",
        "aten::bitwise_xor.Scalar_Tensor",
        "aten::bucketize.Scalar",
        "aten::col2im",
        "aten::scatter.reduce",
        "aten::scatter.value_reduce",
    )
)
"""Operators that no sample of PyTorch's table comes down to on the CPU, and whose arguments made up
from the schema do not fit each other."""
