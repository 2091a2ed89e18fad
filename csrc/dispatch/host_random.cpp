// Random operators of host programs (host_program.h): the numbers that a compiled program for the
// CPU draws (lazyxla/lowering/streams.py), made into distributions by the steps of
// lazyxla/lowering/rules/random.py. Each has the operator's name and schema, and after its
// arguments the stream to draw from.
#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <bit>
#include <cmath>
#include <limits>

namespace lazyxla::dispatch {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;
using c10::IntArrayRef;
using c10::ScalarType;

// ---- bits ----

struct Stream {
  uint64_t seed, ordinal;

  Stream(int64_t seed, int64_t ordinal)
      : seed(static_cast<uint64_t>(seed)), ordinal(static_cast<uint64_t>(ordinal)) {}

  // A block of the sequence, by Threefry 2x32-20 (Salmon et al., Parallel random numbers: as easy
  // as 1, 2, 3): the low half is the first of two numbers of 32 bits.
  uint64_t block(uint64_t index) const {
    constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    const uint64_t counter = (ordinal << 32) + index;
    const auto low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    const uint32_t keys[3] = {low, high, low ^ high ^ 0x1BD11BDA};
    uint32_t x = static_cast<uint32_t>(counter) + keys[0];
    uint32_t y = static_cast<uint32_t>(counter >> 32) + keys[1];
    for (uint32_t turn = 0; turn < 5; ++turn) {
      for (const int rotation : kRotations[turn % 2]) {
        x += y;
        y = std::rotl(y, rotation) ^ x;
      }
      x += keys[(turn + 1) % 3];
      y += keys[(turn + 2) % 3] + turn + 1;
    }
    return static_cast<uint64_t>(y) << 32 | x;
  }

  // A tensor whose elements are made of the first numbers of the stream, Word each.
  template <typename Word, typename Element, typename Make>
  Tensor fill(IntArrayRef sizes, const Make& make) const {
    constexpr int64_t kPerBlock = sizeof(uint64_t) / sizeof(Word);
    const Tensor result = at::empty(sizes, c10::CppTypeToScalarType<Element>::value);
    Element* const elements = result.mutable_data_ptr<Element>();
    const int64_t count = result.numel(), blocks = (count + kPerBlock - 1) / kPerBlock;
    at::parallel_for(0, blocks, 1 << 14, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        uint64_t numbers = block(static_cast<uint64_t>(i));
        for (int64_t at = i * kPerBlock; at < std::min(count, (i + 1) * kPerBlock); ++at) {
          elements[at] = make(static_cast<Word>(numbers));
          if constexpr (kPerBlock > 1) numbers >>= 8 * sizeof(Word);
        }
      }
    });
    return result;
  }
};

// ---- distributions ----

ScalarType sampling_dtype(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

int digits_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return 53;
    case ScalarType::Half:
      return 11;
    case ScalarType::BFloat16:
      return 8;
    default:
      return 24;
  }
}

// Uniform whole numbers below 2**digits, plus a number and times 2**-digits, as float or double.
Tensor unit(IntArrayRef sizes, ScalarType dtype, int digits, double plus, const Stream& stream) {
  const double scale = std::ldexp(1.0, -digits);
  if (dtype == ScalarType::Double) {
    return stream.fill<uint64_t, double>(sizes, [=](uint64_t bits) {
      return (static_cast<double>(bits >> (64 - digits)) + plus) * scale;
    });
  }
  return stream.fill<uint32_t, float>(sizes, [=](uint32_t bits) {
    const float number = static_cast<float>(bits >> (32 - digits)) + static_cast<float>(plus);
    return number * static_cast<float>(scale);
  });
}

// Uniform in (0, 1), symmetric about 1/2, in the dtype to sample in.
Tensor open_unit(const Tensor& like, const Stream& stream) {
  TORCH_CHECK(!like.is_complex(), "complex numbers are drawn by compiled programs");
  const ScalarType dtype = sampling_dtype(like.scalar_type());
  return unit(like.sizes(), dtype, digits_of(dtype) - 1, 0.5, stream);
}

// True with the probability.
Tensor chance(IntArrayRef sizes, double p, const Stream& stream) {
  const float limit = static_cast<float>(p) * (1 << 24);
  return stream.fill<uint32_t, bool>(
      sizes, [=](uint32_t bits) { return static_cast<float>(bits >> 8) < limit; });
}

Tensor chance(IntArrayRef sizes, const Tensor& p, const Stream& stream) {
  if (p.dim() == 0) return chance(sizes, p.item<double>(), stream);
  const ScalarType dtype = sampling_dtype(p.scalar_type());
  return unit(sizes, dtype, digits_of(dtype), 0, stream).lt(p.to(dtype));
}

Tensor uniform(const Tensor& x, double low, double high, const std::optional<at::Generator>&,
               int64_t seed, int64_t ordinal) {
  TORCH_CHECK(!x.is_complex(), "complex numbers are drawn by compiled programs");
  const ScalarType result = x.scalar_type(), dtype = sampling_dtype(result);
  const Tensor drawn = unit(x.sizes(), dtype, digits_of(result), 0, {seed, ordinal});
  if (low == 0 && high == 1) return drawn.to(result);
  const Tensor first = at::scalar_tensor(low, dtype), last = at::scalar_tensor(high, dtype);
  const Tensor scaled = (drawn * (last - first) + first).to(result);
  return at::where(scaled < last.to(result), scaled, first.to(result));
}

Tensor normal(const Tensor& x, double mean, double std, const std::optional<at::Generator>&,
              int64_t seed, int64_t ordinal) {
  const Tensor drawn = open_unit(x, {seed, ordinal});
  const Tensor gauss = (drawn + drawn - 1).erfinv_().mul_(std::sqrt(2.0));
  return gauss.mul_(std).add_(mean).to(x.scalar_type());
}

Tensor exponential(const Tensor& x, double rate, const std::optional<at::Generator>&, int64_t seed,
                   int64_t ordinal) {
  return open_unit(x, {seed, ordinal}).log_().neg_().div_(rate).to(x.scalar_type());
}

Tensor bernoulli(const Tensor& p, const std::optional<at::Generator>&, int64_t seed,
                 int64_t ordinal) {
  return chance(p.sizes(), p, {seed, ordinal}).to(p.scalar_type());
}

Tensor bernoulli_p(const Tensor& x, double p, const std::optional<at::Generator>&, int64_t seed,
                   int64_t ordinal) {
  return chance(x.sizes(), p, {seed, ordinal}).to(x.scalar_type());
}

Tensor bernoulli_tensor(const Tensor& x, const Tensor& p, const std::optional<at::Generator>&,
                        int64_t seed, int64_t ordinal) {
  return chance(x.sizes(), p, {seed, ordinal}).to(x.scalar_type());
}

// ---- integers ----

// In [low, high], by the remainder of 32 or 64 random bits.
Tensor integers(const Tensor& x, int64_t low, int64_t high, const Stream& stream) {
  TORCH_CHECK(!x.is_floating_point(), "whole numbers of floats are drawn by compiled programs");
  const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;  // 0: 2**64
  const auto make = [=](uint64_t bits) {
    return static_cast<int64_t>(static_cast<uint64_t>(low) + (span ? bits % span : bits));
  };
  const bool is_narrow = span != 0 && span <= uint64_t{1} << 32;
  return (is_narrow ? stream.fill<uint32_t, int64_t>(x.sizes(), make)
                    : stream.fill<uint64_t, int64_t>(x.sizes(), make))
      .to(x.scalar_type());
}

int64_t greatest(const Tensor& x) {
  if (x.scalar_type() == ScalarType::Bool) return 1;
  const bool is_signed = c10::isSignedType(x.scalar_type());
  const int bits = static_cast<int>(8 * x.element_size()) - (is_signed ? 1 : 0);
  return bits >= 63 ? std::numeric_limits<int64_t>::max() : (int64_t{1} << bits) - 1;
}

Tensor random(const Tensor& x, const std::optional<at::Generator>&, int64_t seed, int64_t ordinal) {
  return integers(x, 0, greatest(x), {seed, ordinal});
}

Tensor random_from(const Tensor& x, int64_t low, std::optional<int64_t> high,
                   const std::optional<at::Generator>&, int64_t seed, int64_t ordinal) {
  return integers(x, low, high ? *high - 1 : greatest(x), {seed, ordinal});
}

Tensor random_to(const Tensor& x, int64_t high, const std::optional<at::Generator>&, int64_t seed,
                 int64_t ordinal) {
  return integers(x, 0, high - 1, {seed, ordinal});
}

// ---- dropout ----

struct Dropout {
  Tensor mask;
  double factor;

  Dropout(IntArrayRef sizes, double p, const Stream& stream)
      : mask(chance(sizes, 1 - p, stream)), factor(p == 1 ? 0 : 1 / (1 - p)) {}

  Tensor of(const Tensor& x) const {
    const ScalarType dtype = at::toOpMathType(x.scalar_type());
    return (x.to(dtype) * mask.to(dtype).mul_(factor)).to(x.scalar_type());
  }
};

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train,
                                          int64_t seed, int64_t ordinal) {
  if (train == false || p == 0) return {x, at::ones(x.sizes(), ScalarType::Bool)};
  const Dropout dropout(x.sizes(), p, {seed, ordinal});
  return {dropout.of(x), dropout.mask};
}

// ---- attention with dropout, as lazyxla/lowering/rules/attention.py defines it ----

struct Attention {
  Tensor query, key, value;  // in the dtype to compute in, one head of keys for each of queries
  Tensor scores;
  double scale;

  Attention(const Tensor& q, const Tensor& k, const Tensor& v, const OptTensor& mask,
            bool is_causal, std::optional<double> given_scale)
      : scale(given_scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3))))) {
    // From so many scores on a compiled program draws for some rows at a time.
    constexpr int64_t kMostScores = 1 << 22;
    TORCH_CHECK(q.size(0) * q.size(1) * q.size(2) * k.size(2) < kMostScores, "attention in blocks");
    const ScalarType dtype = at::toOpMathType(q.scalar_type());
    const int64_t heads = q.size(1) / k.size(1);
    query = q.to(dtype);
    key = k.to(dtype).repeat_interleave(heads, 1);
    value = v.to(dtype).repeat_interleave(heads, 1);
    scores = at::matmul(query, key.mT()).mul_(scale);
    constexpr double kNever = -std::numeric_limits<double>::infinity();
    if (mask && mask->scalar_type() == ScalarType::Bool) {
      scores.masked_fill_(mask->logical_not(), kNever);
    } else if (mask) {
      scores.add_(mask->to(dtype));
    }
    if (is_causal) {
      scores.masked_fill_(at::ones(scores.sizes().slice(2), ScalarType::Bool).triu_(1), kNever);
    }
  }

  // A row that is masked as a whole has only zeros.
  Tensor weights(const Tensor& log_sums) const {
    const Tensor finite = at::where(log_sums == -INFINITY, 0, log_sums);
    return (scores - finite.unsqueeze(3)).exp_();
  }

  // A gradient of the keys or values, in one part for each head of queries.
  static Tensor of_keys(const Tensor& grad, const Tensor& key) {
    const int64_t groups = key.size(1), heads = grad.size(1) / groups;
    return grad.unflatten(1, {groups, heads}).sum(2).to(key.scalar_type());
  }
};

std::tuple<Tensor, Tensor, Tensor> dropout_attention(const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const OptTensor& mask,
                                                     double p, bool is_causal,
                                                     std::optional<double> scale, int64_t seed,
                                                     int64_t ordinal) {
  const Attention attention(query, key, value, mask, is_causal, scale);
  const Tensor log_sums = attention.scores.logsumexp(3);
  const Dropout dropout(attention.scores.sizes(), p, {seed, ordinal});
  const Tensor kept = dropout.of(attention.weights(log_sums));
  return {at::matmul(kept, attention.value).to(query.scalar_type()), log_sums,
          at::tensor({seed, ordinal}, ScalarType::Long)};
}

std::tuple<Tensor, Tensor, Tensor> dropout_attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
    const OptTensor& mask, const Tensor& result, const Tensor& log_sums, const Tensor& stream,
    double p, bool is_causal, std::optional<double> scale) {
  const Attention attention(query, key, value, mask, is_causal, scale);
  const auto* of_forward = stream.contiguous().const_data_ptr<int64_t>();
  const Dropout dropout(attention.scores.sizes(), p, {of_forward[0], of_forward[1]});
  const Tensor weights = attention.weights(log_sums), above = grad.to(weights.scalar_type());
  const Tensor grad_value = at::matmul(dropout.of(weights).mT(), above);
  const Tensor grad_weights = dropout.of(at::matmul(above, attention.value.mT()));
  const Tensor along = (above * result.to(above.scalar_type())).sum(3, /*keepdim=*/true);
  const Tensor grad_scores = (weights * (grad_weights - along)).mul_(attention.scale);
  return {at::matmul(grad_scores, attention.key).to(query.scalar_type()),
          Attention::of_keys(at::matmul(grad_scores.mT(), attention.query), key),
          Attention::of_keys(grad_value, value)};
}

TORCH_LIBRARY_FRAGMENT(lazyxla_host, m) {
  m.def("uniform", TORCH_FN(uniform));
  m.def("normal_functional", TORCH_FN(normal));
  m.def("exponential", TORCH_FN(exponential));
  m.def("bernoulli", TORCH_FN(bernoulli));
  m.def("bernoulli.p", TORCH_FN(bernoulli_p));
  m.def("bernoulli.Tensor", TORCH_FN(bernoulli_tensor));
  m.def("random", TORCH_FN(random));
  m.def("random.from", TORCH_FN(random_from));
  m.def("random.to", TORCH_FN(random_to));
  m.def("native_dropout", TORCH_FN(native_dropout));
  m.def("dropout_attention", TORCH_FN(dropout_attention));
  m.def("dropout_attention_backward", TORCH_FN(dropout_attention_backward));
}

}  // namespace
}  // namespace lazyxla::dispatch
