// The seam between generic code and an instruction set: everything that differs from one ISA to the next, as one table of functions.
//
// The loops over experts, rows, panels and blocks of k live in ops/; an ISA never sees them. What crosses the seam is one block times one panel, and
// the element-wise passes around it.
#pragma once

#include <cstdint>

namespace moe {

// c[rows, 32] (+)= a[rows, k] * panel over `steps` steps of 32 k. See layout.h for `a` and `b`.
struct BlockProduct {
  const void* a;
  const uint16_t* b;
  float* c;           // [rows][32]
  int rows;           // 1 .. block_rows
  int64_t steps;
  bool accumulate;    // start from c instead of zero
  const uint16_t* next;  // where the following panel begins: fetched towards L2 while this one is multiplied; or null
  int64_t next_bytes;
};

// Rows of x to be brought into one block. Row r starts at x + offsets[r] elements.
struct GatherRows {
  const void* x;
  int dtype;              // moe_dtype
  const int64_t* offsets;
  int rows;
  int64_t k;  // columns; the block's last step is filled up with zeros
  void* block;
};

// h[rows, 16 or 32] = activation(c + bias), rounded once to bf16, into the second product's block at column `column`.
struct Activate {
  const float* c;       // [rows][32]
  const float* bias;    // 32 values in panel order, or null
  int rows;
  int activation;       // moe_activation
  void* block;          // block of the second product: [I / 32][rows][32]
  int64_t column;       // first neuron, a multiple of 16
};

// out[row, column .. column + columns) = c + bias, converted to dtype.
struct StoreRows {
  const float* c;       // [rows][32]
  const float* bias;    // `columns` values, or null
  int rows, columns;    // columns <= 32
  int dtype;
  void* out;
  const int64_t* offsets;  // element offset of every row's first column in `out`
  bool streamed;           // past the caches; float32, whole panels and aligned rows only
};

// out[0 .. columns) = sum over slots of weight * row, in slot order, in float32, converted once to dtype.
struct WeightedSum {
  const float* const* rows;
  const float* weights;
  int slots;
  int64_t columns;
  int dtype;
  void* out;
};

struct KernelTable {
  const char* name;      // that of isa_name(): the tests compare them
  int block_rows;        // most rows of one block
  bool f32_blocks;       // product() takes float32 rows instead of bf16
  int64_t read_slack;    // bytes past the end of a block that product() may read and ignore
  void (*enter)();       // on every thread before product() and after leave()
  void (*leave)();
  void (*product)(const BlockProduct&);
  void (*gather)(const GatherRows&);
  void (*activate)(const Activate&);
  void (*store)(const StoreRows&);
  void (*weighted_sum)(const WeightedSum&);
  int64_t (*peak_loop)(int64_t iterations);  // register-only products of random operands; returns the floating-point operations done
  void (*widen)(const uint16_t* from, float* to, int64_t count) = nullptr;  // bf16 rows to float32, whole steps; where f32_blocks says so
};

// The table of an ISA that can run on this machine, else null.
const KernelTable* kernel_table(int isa);

extern const KernelTable amx_table, avx512_bf16_table, avx512_table, avx2_table, amx_emulated_table;

}  // namespace moe
