// Dense weights to panels and back (layout.h). Pure data movement apart from the conversion to bf16; threads share the panels.
#include <xmmintrin.h>

#include <cstring>

#include "moe/c_api.h"
#include "moe/layout.h"
#include "moe/panel_rows.h"
#include "runtime/parallel.h"

namespace moe {
namespace {

struct Dense {
  int64_t rows, cols;
  int32_t gate_layout;

  bool gated() const { return gate_layout != MOE_UNGATED; }
  int64_t panels() const { return gated() ? w1_panels(rows / 2, true) : ceil_div(rows, kPanelCols); }
  int64_t row_of(int64_t panel, int64_t column) const { return dense_row(gate_layout, rows, panel, column); }
};

uint16_t to_bf16(float value) {
  uint32_t u;
  std::memcpy(&u, &value, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

template <class T>
uint16_t element(const T* from);
template <>
uint16_t element(const uint16_t* from) {
  return *from;
}
template <>
uint16_t element(const float* from) {
  return to_bf16(*from);
}

template <class T>
void pack_tile(const T* row, int64_t column, int64_t k, int64_t count, int64_t stride, uint16_t* tile) {
  for (int64_t i = 0; i < count; ++i) tile[(i / 2 * kTileCols + column) * 2 + i % 2] = element(row + (k + i) * stride);
}

// Columns packed at once: a pair of bf16 is a 32-bit word, and 4x4 of those are transposed in registers.
constexpr int64_t kGroup = 4;
// Steps of a panel that are put together in L1 before they leave for memory, past the caches, which saves reading their lines first. Their 256 bytes
// of every row are read in one go, and meanwhile the row's next ones are asked for: 32 rows are too many streams for the processor to see by itself.
constexpr int64_t kChunkSteps = 4;

template <class T>
struct Source {
  const T* data;
  int64_t stride_row, stride_col;

  const T* at(int64_t row, int64_t k) const { return data + row * stride_row + k * stride_col; }
  bool pairs() const { return sizeof(T) == 2 && stride_col == 1; }  // contiguous bf16
};

// tile: that of the first of the four columns, at its place within the tile.
template <class T>
void pack_pairs(const Source<T>& source, const int64_t (&rows)[kGroup], int64_t k, uint16_t* tile) {
  for (const int64_t row : rows) _mm_prefetch(reinterpret_cast<const char*>(source.at(row, k) + kChunkSteps * kStep), _MM_HINT_T0);
  for (int64_t pair = 0; pair < kStep / 2; pair += kGroup) {
    __m128 words[kGroup];
    for (int64_t i = 0; i < kGroup; ++i) words[i] = _mm_loadu_ps(reinterpret_cast<const float*>(source.at(rows[i], k + pair * 2)));
    _MM_TRANSPOSE4_PS(words[0], words[1], words[2], words[3]);
    for (int64_t i = 0; i < kGroup; ++i) _mm_storeu_ps(reinterpret_cast<float*>(tile + (pair + i) * kTileCols * 2), words[i]);
  }
}

// Columns without a row stay zero, and so does what lies past the last k.
template <class T>
void pack_chunk(const Source<T>& source, const Dense& d, int64_t panel, int64_t first_step, int64_t steps, uint16_t* chunk) {
  std::memset(chunk, 0, static_cast<size_t>(steps * kPanelStep) * sizeof *chunk);
  for (int64_t column = 0; column < kPanelCols; column += kGroup) {
    int64_t rows[kGroup];
    bool whole = source.pairs();
    for (int64_t i = 0; i < kGroup; ++i) {
      rows[i] = d.row_of(panel, column + i);
      whole = whole && rows[i] >= 0;
    }
    uint16_t* tile = chunk + column / kTileCols * kTileElements;
    for (int64_t step = first_step; step < first_step + steps; ++step, tile += kPanelStep) {
      const int64_t k = step * kStep, count = d.cols - k < kStep ? d.cols - k : kStep;
      if (whole && count == kStep) {
        pack_pairs(source, rows, k, tile + column % kTileCols * 2);
        continue;
      }
      for (int64_t i = 0; i < kGroup; ++i) {
        if (rows[i] >= 0) pack_tile(source.at(rows[i], 0), column % kTileCols + i, k, count, source.stride_col, tile);
      }
    }
  }
}

void leave_for_memory(uint16_t* to, const uint16_t* chunk, int64_t elements) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128) != 0) {
    std::memcpy(to, chunk, static_cast<size_t>(elements) * sizeof *to);
    return;
  }
  constexpr int64_t kOnce = sizeof(__m128) / sizeof *chunk;
  for (int64_t i = 0; i < elements; i += kOnce) {
    _mm_stream_ps(reinterpret_cast<float*>(to + i), _mm_load_ps(reinterpret_cast<const float*>(chunk + i)));
  }
}

template <class T>
void pack_panel(const Source<T>& source, const Dense& d, int64_t panel, uint16_t* packed) {
  const int64_t steps = steps_of(d.cols);
  alignas(64) uint16_t chunk[kChunkSteps * kPanelStep];
  for (int64_t first = 0; first < steps; first += kChunkSteps) {
    const int64_t some = steps - first < kChunkSteps ? steps - first : kChunkSteps;
    pack_chunk(source, d, panel, first, some, chunk);
    leave_for_memory(packed + first * kPanelStep, chunk, some * kPanelStep);
  }
}

// `rows` is argument number `first`, `cols` the next one.
int32_t check(int64_t rows, int64_t cols, int32_t gate_layout, int64_t first, int64_t info[4]) {
  info[0] = 0;
  if (rows < 0 || (gate_layout != MOE_UNGATED && rows % 2)) info[0] = first;
  if (cols < 0) info[0] = first + 1;
  return info[0] ? MOE_BAD_ARGUMENT : MOE_OK;
}

}  // namespace
}  // namespace moe

int64_t moe_packed_elements(int64_t rows, int64_t cols, int32_t gate_layout) {
  return moe::Dense{rows, cols, gate_layout}.panels() * moe::panel_elements(cols);
}

int32_t moe_pack_expert(const void* dense, int32_t dtype, int64_t rows, int64_t cols, int64_t stride_row, int64_t stride_col, int32_t gate_layout,
                        uint16_t* packed, int32_t threads, int64_t info[4]) {
  const int32_t status = moe::check(rows, cols, gate_layout, 2, info);
  if (status != MOE_OK) return status;
  if (dtype != MOE_BF16 && dtype != MOE_F32) {
    info[0] = 1;
    return MOE_BAD_ARGUMENT;
  }
  const moe::Dense d{rows, cols, gate_layout};
  moe::parallel(threads, [&](int rank, int team) {
    const moe::Share share = moe::share_of(d.panels(), rank, team);
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      uint16_t* const to = packed + panel * moe::panel_elements(cols);
      if (dtype == MOE_BF16) {
        moe::pack_panel(moe::Source<uint16_t>{static_cast<const uint16_t*>(dense), stride_row, stride_col}, d, panel, to);
      } else {
        moe::pack_panel(moe::Source<float>{static_cast<const float*>(dense), stride_row, stride_col}, d, panel, to);
      }
    }
    _mm_sfence();  // the stores past the caches are weakly ordered
  });
  return MOE_OK;
}

int32_t moe_unpack_expert(const uint16_t* packed, int64_t rows, int64_t cols, int32_t gate_layout, uint16_t* dense, int32_t threads,
                          int64_t info[4]) {
  const int32_t status = moe::check(rows, cols, gate_layout, 1, info);
  if (status != MOE_OK) return status;
  const moe::Dense d{rows, cols, gate_layout};
  const int64_t size = moe::panel_elements(cols);
  moe::parallel(threads, [&](int rank, int team) {
    const moe::Share share = moe::share_of(d.panels(), rank, team);
    for (int64_t panel = share.begin; panel < share.end; ++panel) {
      for (int64_t column = 0; column < moe::kPanelCols; ++column) {
        const int64_t row = d.row_of(panel, column);
        if (row < 0) continue;
        const uint16_t* const tiles = packed + panel * size + column / moe::kTileCols * moe::kTileElements;
        for (int64_t k = 0; k < cols; ++k) {
          const int64_t step = k / moe::kStep, within = k % moe::kStep;
          dense[row * cols + k] = tiles[step * moe::kPanelStep + (within / 2 * moe::kTileCols + column % moe::kTileCols) * 2 + within % 2];
        }
      }
    }
  });
  return MOE_OK;
}
