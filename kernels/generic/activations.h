// Activation functions on sixteen lanes. Errors are a few units in the last place of float32, far below the bf16 rounding that follows.
#pragma once

namespace moe {
namespace {

// e^x by x = n ln 2 + r, |r| <= ln 2 / 2, and the Taylor polynomial of e^r to degree 6: remainder r^7 / 7! < 1.3e-7 relative.
// ln 2 is split so that n * kLn2High is exact for every n that occurs (|n| <= 128 has 8 bits, kLn2High has 15).
inline F32 exp_lanes(F32 x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that sits in the low mantissa bits
  x = at_least(at_most(x, splat(87.0f)), splat(-87.0f));  // keeps 2^n and the reciprocal of e^x normal numbers
  const F32 shifted = fma(x, splat(kLog2E), splat(kMagic));
  const F32 n = shifted - kMagic;
  const F32 r = fma(n, splat(-kLn2Low), fma(n, splat(-kLn2High), x));
  F32 p = splat(1.0f / 720);
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  const F32 power = float_of((bits_of(shifted) + 127u) << 23);  // 2^n: the mantissa's low bits hold n
  return p * power;
}

// 1 / d for 1 <= d < 2^126: a first guess from the bits (Lomont's constant for the reciprocal, 12 % off), then three Newton steps, each squaring the
// error: 1.5e-2, 2e-4, 5e-8. Seven instructions where a 512-bit division occupies its unit for 16 cycles; the same bits on every ISA, unlike RCPPS.
inline F32 reciprocal(F32 d) {
  F32 y = float_of(0x7ef311c7u - bits_of(d));
  for (int step = 0; step < 3; ++step) y = fma(y, fma(-d, y, splat(1.0f)), y);
  return y;
}

// 1 / (1 + e^-z); zero below exp's range, where the true value is less than 2^-125 but a huge factor would still show it.
inline F32 sigmoid(F32 z) {
  const F32 s = reciprocal(1.0f + exp_lanes(-z));
  return z < -87.0f ? splat(0.0f) : s;
}

// x * Phi(x) with the normal distribution's Phi. erfc by the rational Chebyshev fit of Press et al., Numerical Recipes (erfcc): relative error
// 1.2e-7 everywhere, so the negative tail keeps its leading digits.
inline F32 gelu(F32 x) {
  constexpr float kSqrtHalf = 0.707106781f;
  const F32 z = at_most(magnitude(x) * kSqrtHalf, splat(20.0f));  // where erfc is zero; of an infinity the fit would make no number
  const F32 t = reciprocal(fma(z, splat(0.5f), splat(1.0f)));
  F32 p = splat(0.17087277f);
  p = fma(p, t, splat(-0.82215223f));
  p = fma(p, t, splat(1.48851587f));
  p = fma(p, t, splat(-1.13520398f));
  p = fma(p, t, splat(0.27886807f));
  p = fma(p, t, splat(-0.18628806f));
  p = fma(p, t, splat(0.09678418f));
  p = fma(p, t, splat(0.37409196f));
  p = fma(p, t, splat(1.00002368f));
  p = fma(p, t, splat(-1.26551223f));
  const F32 exponent = p - z * z;
  const F32 tail = exponent < -87.0f ? splat(0.0f) : 0.5f * t * exp_lanes(exponent);  // Phi(-|x|), zero below exp's range as in sigmoid
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), written with tanh(u) = 2 sigmoid(2u) - 1.
inline F32 gelu_tanh(F32 x) {
  constexpr float kTwiceSqrt2OverPi = 1.59576912f;
  const F32 u = kTwiceSqrt2OverPi * fma(x * x * x, splat(0.044715f), x);
  return x * sigmoid(u);
}

inline F32 relu2(F32 x) {
  const F32 positive = at_least(x, splat(0.0f));
  return positive * positive;
}

// gpt-oss: both halves clamped, gate * sigmoid(1.702 gate) * (up + 1).
inline F32 swigluoai(F32 gate, F32 up) {
  constexpr float kLimit = 7.0f, kAlpha = 1.702f;
  gate = at_most(gate, splat(kLimit));
  up = at_least(at_most(up, splat(kLimit)), splat(-kLimit));
  return gate * sigmoid(gate * kAlpha) * (up + 1.0f);
}

inline F32 gated(int activation, F32 gate, F32 up) {
  switch (activation) {
    case MOE_GELU:
      return gelu(gate) * up;
    case MOE_GELU_TANH:
      return gelu_tanh(gate) * up;
    case MOE_SWIGLUOAI:
      return swigluoai(gate, up);
    default:  // MOE_SILU: moe_layer lets no other value through
      return gate * sigmoid(gate) * up;
  }
}

}  // namespace
}  // namespace moe
