// The passes around the products: gather rows into a block, activate, store rows, weighted sum. Included once per ISA, after its lanes header.
// `Block` is uint16_t (bf16) or float: what the ISA's products take rows of x in.
#pragma once

#include "generic/activations.h"
#include "moe/kernel_table.h"

namespace moe {
namespace {

inline F32 load_as_f32(const void* from, int dtype, int64_t index, int64_t count) {
  if (dtype == MOE_F32) return load_first<F32>(static_cast<const float*>(from) + index, count);
  const U16 half = load_first<U16>(static_cast<const uint16_t*>(from) + index, count);
  return dtype == MOE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

inline void store_from_f32(void* to, int dtype, int64_t index, int64_t count, F32 value) {
  if (dtype == MOE_F32) return store_first(static_cast<float*>(to) + index, value, count);
  store_first(static_cast<uint16_t*>(to) + index, dtype == MOE_BF16 ? f32_to_bf16(value) : f32_to_f16(value), count);
}

inline void store_block(uint16_t* to, F32 value) { store(to, f32_to_bf16(value)); }
inline void store_block(float* to, F32 value) { store(to, bf16_to_f32(f32_to_bf16(value))); }

template <class Block>
void gather(const GatherRows& g) {
  Block* const block = static_cast<Block*>(g.block);
  const int64_t whole_end = g.k / kStep * kStep;
  for (int r = 0; r < g.rows; ++r) {
    Block* to = block + r * kStep;
    int64_t k = 0;
    for (; k < whole_end; k += kStep, to += g.rows * kStep) {
      if (sizeof(Block) == 2 && g.dtype == MOE_BF16) {
        std::memcpy(to, static_cast<const uint16_t*>(g.x) + g.offsets[r] + k, kStep * sizeof(Block));  // a line
        continue;
      }
      for (int half = 0; half < kStep; half += kLanes) store_block(to + half, load_as_f32(g.x, g.dtype, g.offsets[r] + k + half, kLanes));
    }
    for (; k < g.k; k += kStep, to += g.rows * kStep) {
      for (int half = 0; half < kStep; half += kLanes) {
        const int64_t left = g.k - k - half;
        const int64_t count = left < 0 ? 0 : left < kLanes ? left : kLanes;
        store_block(to + half, load_as_f32(g.x, g.dtype, g.offsets[r] + k + half, count));
      }
    }
  }
}

inline void activate(const Activate& a) {
  uint16_t* const block = static_cast<uint16_t*>(a.block) + a.column / kStep * (a.rows * kStep) + a.column % kStep;
  const F32 left_bias = a.bias ? load<F32>(a.bias) : F32{};
  const F32 right_bias = a.bias ? load<F32>(a.bias + kLanes) : F32{};
  for (int r = 0; r < a.rows; ++r) {
    const float* c = a.c + r * kPanelCols;
    const F32 left = load<F32>(c) + left_bias, right = load<F32>(c + kLanes) + right_bias;
    uint16_t* to = block + r * kStep;
    if (a.activation == MOE_RELU2) {
      store_block(to, relu2(left));
      store_block(to + kLanes, relu2(right));
    } else {
      store_block(to, gated(a.activation, left, right));
    }
  }
}

// Row by row, so that neighbouring lines reach memory together.
inline void store_rows(const StoreRows& s) {
  const auto count = [&](int first) { return s.columns - first < kLanes ? s.columns - first : kLanes; };
  F32 bias[kPanelCols / kLanes] = {};
  for (int first = 0; s.bias && first < s.columns; first += kLanes) bias[first / kLanes] = load_first<F32>(s.bias + first, count(first));
  for (int r = 0; r < s.rows; ++r) {
    for (int first = 0; first < s.columns; first += kLanes) {
      const F32 value = load<F32>(s.c + r * kPanelCols + first) + bias[first / kLanes];
      if (s.streamed) {
        stream(static_cast<float*>(s.out) + s.offsets[r] + first, value);
      } else {
        store_from_f32(s.out, s.dtype, s.offsets[r] + first, count(first), value);
      }
    }
  }
}

inline void weighted_sum(const WeightedSum& w) {
  constexpr int kWide = 4;  // independent chains, to hide the latency of fma
  int64_t column = 0;
  for (; column + kWide * kLanes <= w.columns; column += kWide * kLanes) {
    F32 sum[kWide] = {};
    for (int s = 0; s < w.slots; ++s) {
      const F32 weight = splat(w.weights[s]);
      for (int i = 0; i < kWide; ++i) sum[i] = fma(weight, load<F32>(w.rows[s] + column + i * kLanes), sum[i]);
    }
    for (int i = 0; i < kWide; ++i) store_from_f32(w.out, w.dtype, column + i * kLanes, kLanes, sum[i]);
  }
  for (; column < w.columns; column += kLanes) {
    const int64_t count = w.columns - column < kLanes ? w.columns - column : kLanes;
    F32 sum{};
    for (int s = 0; s < w.slots; ++s) sum = fma(splat(w.weights[s]), load_first<F32>(w.rows[s] + column, count), sum);
    store_from_f32(w.out, w.dtype, column, count, sum);
  }
}

}  // namespace
}  // namespace moe
