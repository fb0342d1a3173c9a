// The exported C interface: raw pointers, 64-bit sizes, status codes. No C++ type, no Python, no torch crosses this line.
//
// Every function that can fail returns a moe_status and fills `info` with the numbers an error message needs. Nothing here throws and nothing
// allocates on a layer call: scratch memory belongs to the caller.
#pragma once

#include <stdint.h>

#define MOE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Bumped whenever a struct below or the packed layout changes; the Python side refuses a library of another version.
#define MOE_ABI_VERSION 3

enum moe_status {
  MOE_OK = 0,
  MOE_BAD_EXPERT_ID = 1,    // info = {flat position, value, number of global experts}
  MOE_ISA_UNAVAILABLE = 2,  // info = {isa index}
  MOE_SCRATCH_TOO_SMALL = 3,  // info = {bytes needed, bytes given}
  MOE_BAD_ARGUMENT = 4,     // info = {number of the offending argument}
  MOE_TOO_LARGE = 5,        // info = {value, limit}
  MOE_BAD_TOKEN_COUNT = 7,  // info = {local expert, its expert_num_tokens, max_num_tokens}
  MOE_BAD_EXPERT_MAP = 8,   // info = {global expert, its local expert, number of local experts}
};

enum moe_dtype { MOE_F32 = 0, MOE_BF16 = 1, MOE_F16 = 2, MOE_I32 = 3, MOE_I64 = 4 };

enum moe_activation { MOE_SILU = 0, MOE_GELU = 1, MOE_GELU_TANH = 2, MOE_SWIGLUOAI = 3, MOE_RELU2 = 4 };

// Row order of a dense w1: gate rows then up rows; gate and up rows alternating; no gate at all.
enum moe_gate_layout { MOE_CONCATENATED = 0, MOE_INTERLEAVED = 1, MOE_UNGATED = 2 };

// ---- instruction sets -------------------------------------------------------------------------------------------------------------------
MOE_API int32_t moe_abi_version(void);
MOE_API int32_t moe_isa_count(void);
MOE_API const char* moe_isa_name(int32_t isa);        // NULL past the end
MOE_API const char* moe_isa_why_not(int32_t isa);     // NULL when the ISA can run here, else a sentence
MOE_API int32_t moe_isa_in_order(int32_t place);      // the fastest on this CPU has place 0; -1 past the end
MOE_API const char* moe_cpu_features(void);           // space-separated names of the bits found
MOE_API int64_t moe_cache_bytes(int32_t level);       // data or unified cache of one core, 0 when unknown

// ---- threads ----------------------------------------------------------------------------------------------------------------------------
MOE_API int32_t moe_openmp_max_threads(void);         // what the calling thread's next parallel region would use
MOE_API int32_t moe_parallel_team(int32_t threads);   // the team size that a request for `threads` really gets

// ---- align ------------------------------------------------------------------------------------------------------------------------------
// See moe_cpu/align.py. ids may have any strides (in elements). expert_map is NULL or [num_experts] int32. `scratch` needs
// moe_align_scratch_bytes(tokens * topk, sorted_len, num_experts, threads) bytes.
MOE_API int64_t moe_align_scratch_bytes(int64_t numel, int64_t sorted_len, int64_t num_experts, int32_t threads);
MOE_API int32_t moe_align_block_size(const void* ids, int32_t ids_dtype, int64_t tokens, int64_t topk, int64_t stride_token, int64_t stride_slot,
                                     int64_t block_size, int64_t num_experts, const int32_t* expert_map, int64_t sorted_len, int64_t blocks_len,
                                     int32_t* sorted_token_ids, int32_t* expert_ids, int32_t* num_tokens_post_pad, void* scratch, int32_t threads,
                                     int64_t info[4]);

// ---- packing ----------------------------------------------------------------------------------------------------------------------------
// One expert's matrix [rows, cols] -> panels. Layout: include/moe/layout.h. dtype is the dense dtype, bf16 or f32 (rounded to bf16, to nearest
// even). w1 is paired by `gate_layout`; w2 always uses MOE_UNGATED. Strides in elements.
MOE_API int64_t moe_packed_elements(int64_t rows, int64_t cols, int32_t gate_layout);
MOE_API int32_t moe_pack_expert(const void* dense, int32_t dtype, int64_t rows, int64_t cols, int64_t stride_row, int64_t stride_col,
                                int32_t gate_layout, uint16_t* packed, int32_t threads, int64_t info[4]);
MOE_API int32_t moe_unpack_expert(const uint16_t* packed, int64_t rows, int64_t cols, int32_t gate_layout, uint16_t* dense, int32_t threads,
                                  int64_t info[4]);

// ---- the layer --------------------------------------------------------------------------------------------------------------------------
enum moe_layer_mode {
  MOE_REDUCED = 0,    // out [tokens, hidden]: weighted and summed over topk
  MOE_UNREDUCED = 1,  // out [tokens, topk, hidden]: neither weighted nor summed; rows of skipped slots are zero
  MOE_BATCHED = 2,    // x, out [experts, tokens, hidden]; expert_num_tokens says how many rows of each expert are real
};

typedef struct moe_layer_args {
  int64_t tokens, hidden, intermediate, experts, topk, global_experts;
  const void* x;             // [tokens, hidden] or [experts, tokens, hidden]
  int64_t x_stride_expert;   // MOE_BATCHED only
  int64_t x_stride_token;    // the hidden dimension has stride 1
  const void* topk_ids;      // [tokens, topk] int32 or int64, global ids, -1 = no expert
  int64_t ids_stride_token, ids_stride_slot;
  const void* topk_weights;  // [tokens, topk]; NULL = every weight is one
  int64_t weights_stride_token, weights_stride_slot;
  const int32_t* expert_map;        // NULL or [global_experts]
  const int32_t* expert_num_tokens; // MOE_BATCHED only, [experts]
  const uint16_t* w1;        // packed, experts back to back
  const uint16_t* w2;
  const float* w1_bias;      // NULL or [experts, N] in dense row order
  const float* w2_bias;      // NULL or [experts, hidden]
  void* out;                 // contiguous, x's dtype
  void* scratch;
  int64_t scratch_bytes;
  int32_t x_dtype, ids_dtype, weights_dtype, activation, gate_layout, mode, isa, threads;
} moe_layer_args;

// `scratch` is aligned to 64 bytes. Sizes are at least 1, tokens may be 0.
// What a call works in: at most 64 MiB + rows * (hidden + intermediate) * 2, where rows = tokens * topk, or experts * tokens when batched. Layers
// narrower than 192 columns may take more, by 64 MiB beyond what they keep of their rows. Reads only sizes, dtypes, mode, isa and threads.
MOE_API int64_t moe_layer_scratch_bytes(const moe_layer_args* args);
MOE_API int32_t moe_layer(const moe_layer_args* args, int64_t info[4]);

// ---- ceilings for benchmarks --------------------------------------------------------------------------------------------------------------
MOE_API double moe_probe_matrix_peak(int32_t isa, int32_t threads, double seconds);  // FLOP/s, operands random and in registers
MOE_API double moe_probe_read_bandwidth(const void* data, int64_t bytes, int32_t threads, double seconds);  // bytes/s
MOE_API double moe_probe_copy_bandwidth(const void* from, void* to, int64_t bytes, int32_t threads,
                                        double seconds);  // bytes read + written per second

#ifdef __cplusplus
}
#endif
