// Intel AMX, bf16: TDPBF16PS on 16x16 tiles.
//
// Registers (all eight): 0..3 accumulators of a 32x32 block (row tile, column tile) = (0,0) (0,1) (1,0) (1,1); 4, 5 the two B tiles of a step;
// 6, 7 the two A tiles. Four loads serve four products, the best ratio eight registers allow: 3x2 accumulators leave two registers for operands and
// need seven loads for six products.
//
// The next step's loads stand between this step's products, each behind the last use of its register. Loads ahead of the products that need
// them were slower on a CPU that renames tile registers too: perhaps too few are left where two hyper-threads share them (bench/README.md).
//
// A block of 17..32 rows has both of its A tiles in one 64-byte-stride stream, so rows past the block's end are read as whatever follows (read_slack)
// and only spoil accumulator rows that nobody looks at. One row takes the same path as sixteen: what decides there is how fast the panel arrives, and
// tile loads read memory faster than vector loads did (bench/README.md), so a token's bits never depend on how many share its expert.
#include "isa/bf16_by_instruction.h"
#include "generic/elementwise.h"
#include "generic/peak_operands.h"
#include "isa/ahead.h"
#include "isa/flush_denormals.h"

namespace moe {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // one row of a tile
constexpr int kCStride = kPanelCols * sizeof(float);
// Tiles keep up with memory where a block has a panel for itself, and memory gives no more to several streams then (bench/README.md).
constexpr int kLoneStreams = 1;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

void enter() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = kTileBytes;
    config.rows[tile] = kTileRows;
  }
  consume(&config);  // the intrinsic tells the compiler of the first eight bytes only
  _tile_loadconfig(&config);
  flush_denormals();
}

void leave() {
  _tile_release();
  keep_denormals();
}

void two_row_tiles(const BlockProduct& p) {
  float* const lower = p.c + kTileRows * kPanelCols;
  if (p.accumulate) {
    _tile_loadd(0, p.c, kCStride);
    _tile_loadd(1, p.c + kTileCols, kCStride);
    _tile_loadd(2, lower, kCStride);
    _tile_loadd(3, lower + kTileCols, kCStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const uint16_t* a = static_cast<const uint16_t*>(p.a);
  const uint16_t* b = p.b;
  const int64_t a_step = int64_t{p.rows} * kStep;
  Ahead ahead(p, kLoneStreams);
  // Behind each product, besides a part of the following panel: a quarter of the rows that the next turn loads, towards L1 (bench/README.md).
  const auto ask = [&](int quarter) {
    ahead.quarter();
    for (int row = quarter * kTileRows / 2; row < (quarter + 1) * kTileRows / 2; ++row) {
      _mm_prefetch(reinterpret_cast<const char*>(a + a_step + row * kStep), _MM_HINT_T0);
    }
  };
  _tile_loadd(4, b, kTileBytes);
  _tile_loadd(5, b + kTileElements, kTileBytes);
  _tile_loadd(6, a, kTileBytes);
  _tile_loadd(7, a + kTileRows * kStep, kTileBytes);
  for (int64_t s = 1; s < p.steps; ++s) {
    a += a_step;
    b += kPanelStep;
    _tile_dpbf16ps(0, 6, 4);
    ask(0);
    _tile_dpbf16ps(1, 6, 5);
    ask(1);
    _tile_loadd(6, a, kTileBytes);
    _tile_dpbf16ps(2, 7, 4);
    ask(2);
    _tile_loadd(4, b, kTileBytes);
    _tile_dpbf16ps(3, 7, 5);
    ask(3);
    _tile_loadd(7, a + kTileRows * kStep, kTileBytes);
    _tile_loadd(5, b + kTileElements, kTileBytes);
  }
  ahead.rest();
  _tile_dpbf16ps(0, 6, 4);
  _tile_dpbf16ps(1, 6, 5);
  _tile_dpbf16ps(2, 7, 4);
  _tile_dpbf16ps(3, 7, 5);
  _tile_stored(0, p.c, kCStride);
  _tile_stored(1, p.c + kTileCols, kCStride);
  _tile_stored(2, lower, kCStride);
  _tile_stored(3, lower + kTileCols, kCStride);
}

void one_row_tile(const BlockProduct& p) {
  if (p.accumulate) {
    _tile_loadd(0, p.c, kCStride);
    _tile_loadd(1, p.c + kTileCols, kCStride);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  const uint16_t* a = static_cast<const uint16_t*>(p.a);
  const uint16_t* b = p.b;
  const int64_t a_step = int64_t{p.rows} * kStep;
  Ahead ahead(p, kLoneStreams);
  _tile_loadd(4, b, kTileBytes);
  _tile_loadd(5, b + kTileElements, kTileBytes);
  _tile_loadd(6, a, kTileBytes);
  for (int64_t s = 1; s < p.steps; ++s) {
    a += a_step;
    b += kPanelStep;
    ahead.quarter();
    ahead.quarter();
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(4, b, kTileBytes);
    ahead.quarter();
    ahead.quarter();
    _tile_dpbf16ps(1, 6, 5);
    _tile_loadd(5, b + kTileElements, kTileBytes);
    _tile_loadd(6, a, kTileBytes);
  }
  ahead.rest();
  _tile_dpbf16ps(0, 6, 4);
  _tile_dpbf16ps(1, 6, 5);
  _tile_stored(0, p.c, kCStride);
  _tile_stored(1, p.c + kTileCols, kCStride);
}

void product(const BlockProduct& p) {
  if (p.rows <= kTileRows) {
    one_row_tile(p);
  } else {
    two_row_tiles(p);
  }
}

int64_t peak_loop(int64_t iterations) {
  alignas(64) uint16_t operands[2 * kPanelStep];
  alignas(64) float c[kTileRows * kTileCols];
  random_bf16(operands, 2 * kPanelStep);
  consume(operands);  // tile loads do not name the memory they read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, operands, kTileBytes);
  _tile_loadd(5, operands + kTileElements, kTileBytes);
  _tile_loadd(6, operands + kPanelStep, kTileBytes);
  _tile_loadd(7, operands + kPanelStep + kTileElements, kTileBytes);
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 6, 4);
    _tile_dpbf16ps(1, 6, 5);
    _tile_dpbf16ps(2, 7, 4);
    _tile_dpbf16ps(3, 7, 5);
  }
  _tile_stored(3, c, kTileCols * sizeof(float));
  consume(c);
  return iterations * 4 * 2 * kTileRows * kTileCols * kStep;
}

}  // namespace

const KernelTable amx_table = {"amx",      2 * kTileRows, false,    (kTileRows - 1) * kTileBytes, enter, leave, product, gather<uint16_t>, activate,
                               store_rows, weighted_sum,  peak_loop};

}  // namespace moe
