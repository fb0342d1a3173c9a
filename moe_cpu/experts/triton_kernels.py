"""The GPU kernels of a layer: two grouped GEMMs over blocks of rows that share an expert, and the weighted sum.

A block is up to BLOCK_M rows of one expert. Where they are depends on ORDER:
    SORTED    block b is slots [b * BLOCK_M, (b + 1) * BLOCK_M) of `sorted_token_ids`; its expert is `expert_ids[b]`
    UNSORTED  block b is pair b alone, its expert is the pair's own; for calls of a few tokens
    BATCHED   block b is rows of one expert of a batched input, `[E, max_num_tokens, K]`
A *slot* is a row of the activation between the GEMMs; a *pair* is token * topk + slot number, a row of the result.

Rows beside the block's real ones read a real row's operands and are never stored, so that loads need no mask and no row can reach another.
The expert's and the rows' offsets are 64-bit. Triton's interpreter differs from the GPU in bf16: it multiplies bit patterns, so INTERPRET makes operands
float32, and it cuts float32 off instead of rounding, so INTERPRET rounds before.
"""

from __future__ import annotations

import triton
import triton.language as tl

SORTED, UNSORTED, BATCHED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def local_expert(ids_ptr, map_ptr, position, num_ids, E, HAS_MAP: tl.constexpr):
    """Local expert of a pair, -1 for none: id -1, an id outside [0, num_ids), and an expert on another rank."""
    expert = tl.load(ids_ptr + position)
    known = (expert >= 0) & (expert < num_ids)
    if HAS_MAP:
        expert = tl.load(map_ptr + expert, mask=known, other=-1)
        known = (expert >= 0) & (expert < E)
    return tl.where(known, expert, -1).to(tl.int32)


@triton.jit
def _place(pid, blocks, tiles, GROUP: tl.constexpr):
    """Block and column tile of a program: GROUP blocks run side by side through all tiles, so they share weights in L2."""
    width = GROUP * tiles
    first = (pid // width) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    return first + (pid % width) % size, (pid % width) // size


@triton.jit
def _rows(
    block, sorted_ptr, experts_ptr, ids_ptr, map_ptr, counts_ptr, pairs, num_ids, E, max_tokens,
    ORDER: tl.constexpr, HAS_MAP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Expert, slots, pairs and validity of a block's rows; both numbers of a row that is not real may be read from."""
    lane = tl.arange(0, BLOCK_M)
    if ORDER == SORTED:
        expert = tl.load(experts_ptr + block)
        slot = block.to(tl.int64) * BLOCK_M + lane
        pair = tl.load(sorted_ptr + slot).to(tl.int64)
        valid = pair < pairs
        pair = tl.minimum(pair, pairs - 1)
    elif ORDER == UNSORTED:
        expert = local_expert(ids_ptr, map_ptr, block, num_ids, E, HAS_MAP)
        slot = block.to(tl.int64) + lane * 0
        pair = slot
        valid = lane == 0
    else:
        blocks_each = tl.cdiv(max_tokens, BLOCK_M)
        expert = block // blocks_each
        row = (block % blocks_each) * BLOCK_M + lane
        valid = row < tl.minimum(tl.load(counts_ptr + expert).to(tl.int32), max_tokens)
        slot = expert.to(tl.int64) * max_tokens + tl.where(valid, row, 0)
        pair = slot
        expert = tl.where(tl.max(valid.to(tl.int32), 0) > 0, expert, -1)
    return tl.where((expert >= 0) & (expert < E), expert, -1), slot, pair, valid


@triton.jit
def _product(a, b, acc, INTERPRET: tl.constexpr):
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc)


@triton.jit
def _rounded(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """x in another dtype, to nearest, ties to even."""
    if INTERPRET and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + (0x7FFF + ((bits >> 16) & 1))) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(dtype)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up in float32. Comparisons, not minimum and maximum, which would drop a NaN."""
    if ACTIVATION == "silu":
        return gate * _sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
        return gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif ACTIVATION == "swigluoai":
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate * _sigmoid(1.702 * gate) * (up + 1.0)
    else:
        positive = tl.where(gate < 0.0, 0.0, gate)
        return positive * positive


@triton.jit(do_not_specialize=["pairs", "topk", "num_ids", "E", "max_tokens", "blocks"])
def first_gemm(
    x_ptr, w_ptr, w_desc, bias_ptr, h_ptr,
    sorted_ptr, experts_ptr, used_ptr, ids_ptr, map_ptr, counts_ptr,
    pairs, topk, num_ids, max_tokens, blocks, E, K, I,
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk, stride_be, stride_bn, up_w, up_b,
    ORDER: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, EVEN_K: tl.constexpr, TMA: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """h[slot] = act(x[token] @ w1[e, gate rows].T + b) * (x[token] @ w1[e, up rows].T + b), rounded once; the product itself is never stored.

    stride_wn and stride_bn lead from one channel's gate row to the next one's, up_w and up_b from a gate row to its up row, so that
    [gate; up] and alternating rows are the same code. The copy engine sees [E * N, K], or [E * I, 2 * K] for alternating rows.
    """
    tiles = tl.cdiv(I, BLOCK_N)
    if ORDER == SORTED:
        blocks = tl.load(used_ptr) // BLOCK_M
    pid = tl.program_id(0)
    if pid >= blocks * tiles:
        return
    block, tile = _place(pid, blocks, tiles, GROUP)
    expert, slot, pair, valid = _rows(
        block, sorted_ptr, experts_ptr, ids_ptr, map_ptr, counts_ptr, pairs, num_ids, E, max_tokens, ORDER, HAS_MAP, BLOCK_M,
    )  # fmt: skip
    if expert < 0:
        return
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < I
    row = tl.where(inside, column, 0)
    depth = tl.arange(0, BLOCK_K)
    token = pair // topk
    a_ptrs = x_ptr + token[:, None] * stride_xm + depth[None, :] * stride_xk
    w_ptr += expert.to(tl.int64) * stride_we
    b_ptrs = w_ptr + row[None, :].to(tl.int64) * stride_wn + depth[:, None] * stride_wk
    first_row = expert * (2 * I if GATED and not INTERLEAVED else I) + tile * BLOCK_N
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs) if EVEN_K else tl.load(a_ptrs, mask=depth[None, :] < K - k, other=0.0)
        if TMA:
            b = w_desc.load([first_row, k]).T
        elif EVEN_K:
            b = tl.load(b_ptrs)
        else:
            b = tl.load(b_ptrs, mask=depth[:, None] < K - k, other=0.0)
        a = _rounded(a, b.dtype, INTERPRET)
        gate = _product(a, b, gate, INTERPRET)
        if GATED:
            if TMA and INTERLEAVED:
                c = w_desc.load([first_row, K + k]).T
            elif TMA:
                c = w_desc.load([first_row + I, k]).T
            elif EVEN_K:
                c = tl.load(b_ptrs + up_w)
            else:
                c = tl.load(b_ptrs + up_w, mask=depth[:, None] < K - k, other=0.0)
            up = _product(a, c, up, INTERPRET)
        a_ptrs += BLOCK_K * stride_xk
        b_ptrs += BLOCK_K * stride_wk
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_be + row * stride_bn
        gate += tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_ptrs + up_b, mask=inside, other=0.0).to(tl.float32)[None, :]
    h = _activate(gate, up, ACTIVATION)
    tl.store(
        h_ptr + slot[:, None] * I + column[None, :],
        _rounded(h, h_ptr.dtype.element_ty, INTERPRET),
        mask=valid[:, None] & inside[None, :],
    )


@triton.jit(do_not_specialize=["pairs", "num_ids", "E", "max_tokens", "blocks"])
def second_gemm(
    h_ptr, w_ptr, w_desc, bias_ptr, y_ptr,
    sorted_ptr, experts_ptr, used_ptr, ids_ptr, map_ptr, counts_ptr,
    pairs, num_ids, max_tokens, blocks, E, K, I,
    stride_we, stride_wk, stride_wi, stride_be, stride_bk,
    ORDER: tl.constexpr, HAS_MAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_I: tl.constexpr, TMA: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """y[pair] = h[slot] @ w2[e].T + b2[e], neither weighted nor summed."""
    tiles = tl.cdiv(K, BLOCK_N)
    if ORDER == SORTED:
        blocks = tl.load(used_ptr) // BLOCK_M
    pid = tl.program_id(0)
    if pid >= blocks * tiles:
        return
    block, tile = _place(pid, blocks, tiles, GROUP)
    expert, slot, pair, valid = _rows(
        block, sorted_ptr, experts_ptr, ids_ptr, map_ptr, counts_ptr, pairs, num_ids, E, max_tokens, ORDER, HAS_MAP, BLOCK_M,
    )  # fmt: skip
    if expert < 0:
        return
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < K
    row = tl.where(inside, column, 0)
    depth = tl.arange(0, BLOCK_K)
    a_ptrs = h_ptr + slot[:, None] * I + depth[None, :]
    w_ptr += expert.to(tl.int64) * stride_we
    b_ptrs = w_ptr + row[None, :].to(tl.int64) * stride_wk + depth[:, None] * stride_wi
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for i in range(0, I, BLOCK_K):
        a = tl.load(a_ptrs) if EVEN_I else tl.load(a_ptrs, mask=depth[None, :] < I - i, other=0.0)
        if TMA:
            b = w_desc.load([expert * K + tile * BLOCK_N, i]).T
        elif EVEN_I:
            b = tl.load(b_ptrs)
        else:
            b = tl.load(b_ptrs, mask=depth[:, None] < I - i, other=0.0)
        acc = _product(a, b, acc, INTERPRET)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * stride_wi
    if HAS_BIAS:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_be + row * stride_bk
        acc += tl.load(bias_ptrs, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        y_ptr + pair[:, None] * K + column[None, :],
        _rounded(acc, y_ptr.dtype.element_ty, INTERPRET),
        mask=valid[:, None] & inside[None, :],
    )


@triton.jit(do_not_specialize=["num_ids", "E"])
def weighted_sum(
    y_ptr, weights_ptr, ids_ptr, map_ptr, out_ptr, topk, num_ids, E, K, stride_om, stride_ok,
    HAS_MAP: tl.constexpr, HAS_WEIGHTS: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[m] = sum over s of weights[m, s] * y[m, s], slots in order, float32; a pair without an expert is not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = column < K
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for slot in range(topk):
        pair = token * topk + slot
        if local_expert(ids_ptr, map_ptr, pair, num_ids, E, HAS_MAP) >= 0:
            term = tl.load(y_ptr + pair * K + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                term = term * tl.load(weights_ptr + pair).to(tl.float32)
            total += term
    total = _rounded(total, out_ptr.dtype.element_ty, INTERPRET)
    tl.store(out_ptr + token * stride_om + column * stride_ok, total, mask=inside)


@triton.jit(do_not_specialize=["num_ids", "E"])
def clear_skipped(y_ptr, ids_ptr, map_ptr, num_ids, E, K, HAS_MAP: tl.constexpr, BLOCK_K: tl.constexpr):
    """y[pair] = 0 where the pair has no expert here."""
    pair = tl.program_id(0).to(tl.int64)
    if local_expert(ids_ptr, map_ptr, pair, num_ids, E, HAS_MAP) < 0:
        for start in range(0, K, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            tl.store(
                y_ptr + pair * K + column,
                tl.zeros((BLOCK_K,), dtype=y_ptr.dtype.element_ty),
                mask=column < K,
            )
