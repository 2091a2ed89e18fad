// The element types that XLA and PyTorch share, by the names that their enumerations have for them.
#pragma once

// clang-format off
#define LAZYXLA_ELEMENT_TYPES(X)                                \
  X(PRED, Bool)                                                 \
  X(U8, Byte) X(U16, UInt16) X(U32, UInt32) X(U64, UInt64)      \
  X(S8, Char) X(S16, Short) X(S32, Int) X(S64, Long)            \
  X(F16, Half) X(BF16, BFloat16) X(F32, Float) X(F64, Double)   \
  X(C64, ComplexFloat) X(C128, ComplexDouble)                   \
  X(F8E5M2, Float8_e5m2) X(F8E4M3FN, Float8_e4m3fn)             \
  X(F8E5M2FNUZ, Float8_e5m2fnuz) X(F8E4M3FNUZ, Float8_e4m3fnuz)
// clang-format on
