"""One layer call by the native library, as typed Python functions that go straight to C.

Functions here trust their callers: shapes, dtypes and devices have been checked (`moe_cpu.checks`). What only the data can tell, an expert id out of
range, the native code checks before it writes anything. The same as torch operators, for graphs: `moe_cpu.torch_ops`. Packing: `moe_cpu.pack_ops`;
sorting ids: `moe_cpu.align_ops`.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_cpu import native_library as native
from moe_cpu.errors import ArgumentError, IsaUnavailable, dtype_name, no_memory_error, out_of_memory_error

if TYPE_CHECKING:
    from moe_cpu.packing import PackedExperts

# moe_layer_args of c_api.h: 24 words of 64 bits, then 8 of 32.
_LAYER_ARGS = struct.Struct("=24q8i")


class _PerThread(threading.local):
    """The error numbers and scratch memory of one Python thread; reused by every call it makes."""

    def __init__(self) -> None:
        self.busy = False
        self.info = native.Info()
        self.info_address = ctypes.addressof(self.info)
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.scratch_address = 0
        self.scratch_bytes = 0

    def grow(self, size: int) -> None:
        # Let go of the old one first, addresses too: the new one may not be had.
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.scratch_address, self.scratch_bytes = 0, 0
        try:
            self.scratch = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise out_of_memory_error("scratch memory of one call", size) from error
        self.scratch_address, self.scratch_bytes = self.scratch.data_ptr(), size


_mine = _PerThread()
_isas: tuple[str, ...] | None = None


def _undecided() -> int:
    raise IsaUnavailable("no instruction set has been chosen: moe_cpu.isa, which chooses, was not imported")


# Answers with the number of the instruction set that calls without one use; `moe_cpu.isa` puts itself here.
active_isa: Callable[[], int] = _undecided


def available() -> bool:
    """Whether the native library is there and loads."""
    return native.why_not() is None


def why_not() -> str | None:
    """Why it is not, or None."""
    return native.why_not()


def isas() -> tuple[str, ...]:
    """Names of the instruction sets the library has kernels for, in priority order; empty without a library."""
    global _isas
    if _isas is None:
        if not available():
            return ()
        lib = native.library()
        _isas = tuple(lib.moe_isa_name(i).decode() for i in range(lib.moe_isa_count()))
    return _isas


def isa_why_not(name: str) -> str | None:
    """Why that instruction set cannot run here, or None when it can."""
    if not available():
        return native.why_not()
    reason = native.library().moe_isa_why_not(isas().index(name))
    return None if reason is None else reason.decode()


def _isa_index(isa: str | int | None) -> int:
    if isinstance(isa, int):
        return isa
    if isa is None:
        return active_isa()
    reason = isa_why_not(isa)
    if reason is not None:
        raise IsaUnavailable(f"isa = {isa}: {reason}")
    return isas().index(isa)


def borrow() -> _PerThread:
    """The calling thread's memory, busy until the caller says otherwise; a call in the middle of another (signal handler) gets its own, as it may grow it."""
    mine = _PerThread() if _mine.busy else _mine
    mine.busy = True
    return mine


def scratch_bytes_held() -> int:
    """Bytes of scratch memory the calling Python thread holds for its calls."""
    return _mine.scratch_bytes


def layer(
    x: Tensor,
    packed: PackedExperts,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    out: Tensor,
    mode: int,
    activation: str,
    expert_map: Tensor | None = None,
    expert_num_tokens: Tensor | None = None,
    isa: str | int | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """One native layer call; see `fused_experts`, `experts_unreduced` and `experts_batched` for the three modes. Returns `out`."""
    mine = borrow()
    try:
        return _layer(
            mine,
            x,
            packed,
            topk_weights,
            topk_ids,
            out,
            mode,
            activation,
            expert_map,
            expert_num_tokens,
            isa,
            scratch,
        )
    finally:
        mine.busy = False


def _layer(
    mine: _PerThread, x: Tensor, packed: PackedExperts, topk_weights: Tensor | None, topk_ids: Tensor | None, out: Tensor, mode: int,
    activation: str, expert_map: Tensor | None, expert_num_tokens: Tensor | None, isa: str | int | None, scratch: Tensor | None,
) -> Tensor:  # fmt: skip
    call = native.library().moe_layer
    sizes, strides = x.shape, x.stride()
    if strides[-1] != 1 and sizes[-1] > 1:
        x = x.contiguous()
        strides = x.stride()
    if topk_ids is None:
        ids_address, (ids_token, ids_slot), topk, ids_dtype = 0, (0, 0), 1, 3
    else:
        ids_address, (ids_token, ids_slot) = topk_ids.data_ptr(), topk_ids.stride()
        topk, ids_dtype = topk_ids.shape[1], native.DTYPE_CODES[topk_ids.dtype]
    if topk_weights is None:
        weights_address, (weights_token, weights_slot), weights_dtype = 0, (0, 0), 0
    else:
        weights_address, (weights_token, weights_slot) = topk_weights.data_ptr(), topk_weights.stride()
        weights_dtype = native.DTYPE_CODES[topk_weights.dtype]
    if scratch is None:
        scratch_address, scratch_bytes = mine.scratch_address, mine.scratch_bytes
    else:
        scratch_address, scratch_bytes = scratch.data_ptr(), scratch.numel() * scratch.element_size()
    w1_bias, w2_bias = packed._w1_bias, packed._w2_bias  # past the properties: this is the hot path
    index = isa if type(isa) is int else _isa_index(isa)
    x_dtype, threads = native.DTYPE_CODES[x.dtype], torch.get_num_threads()
    x_address, out_address, w1_address = x.data_ptr(), out.data_ptr(), packed._w1.data_ptr()
    if sizes[-2] > 0 and not (x_address and out_address and w1_address and (ids_address or topk_ids is None)):
        raise no_memory_error("fused experts")
    while True:
        block = _LAYER_ARGS.pack(
            sizes[-2], sizes[-1], packed.I, packed.E, topk, packed.E if expert_map is None else expert_map.shape[0],
            x_address, strides[0], strides[-2],
            ids_address, ids_token, ids_slot, weights_address, weights_token, weights_slot,
            0 if expert_map is None else expert_map.data_ptr(),
            0 if expert_num_tokens is None else expert_num_tokens.data_ptr(),
            w1_address, packed._w2.data_ptr(),
            0 if w1_bias is None else w1_bias.data_ptr(), 0 if w2_bias is None else w2_bias.data_ptr(),
            out_address, scratch_address, scratch_bytes,
            x_dtype, ids_dtype, weights_dtype,
            native.ACTIVATION_CODES[activation], packed.gate_layout_code, mode, index, threads,
        )  # fmt: skip
        status = call(block, mine.info_address)
        if status == 0:
            return out
        if status == native.SCRATCH_TOO_SMALL and scratch is not None:
            raise ArgumentError(
                f"workspace2: expected at least {-(-mine.info[0] // scratch.element_size())} elements of {dtype_name(scratch.dtype)}, "
                f"got {scratch.numel()}; size it with workspace_shapes"
            )
        if status != native.SCRATCH_TOO_SMALL:
            raise native.failure(status, mine.info, "fused experts", topk)
        mine.grow(mine.info[0])
        scratch_address, scratch_bytes = mine.scratch_address, mine.scratch_bytes


def as_int32(numbers: Tensor) -> Tensor:
    """Contiguous int32; what does not fit becomes a number that is refused, instead of wrapping around to one that is right."""
    if numbers.dtype != torch.int32:
        numbers = numbers.clamp(-(2**31), 2**31 - 1).to(torch.int32)
    return numbers.contiguous()


def layer_scratch_bytes(
    tokens: int, topk: int, packed: Any, dtype: torch.dtype, mode: int, isa: str | int | None = None
) -> int:
    """Bytes of scratch memory one layer call needs. `packed` is anything with E, K, I and gate_layout_code."""
    args = bytearray(_LAYER_ARGS.size)
    _LAYER_ARGS.pack_into(
        args, 0, tokens, packed.K, packed.I, packed.E, topk, packed.E, *([0] * 18),
        native.DTYPE_CODES[dtype], 3, 0, 0, packed.gate_layout_code, mode, _isa_index(isa), torch.get_num_threads(),
    )  # fmt: skip
    return int(native.library().moe_layer_scratch_bytes(ctypes.addressof(ctypes.c_char.from_buffer(args))))


def fused_experts(
    x: Tensor,
    packed: PackedExperts,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    activation: str,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
    isa: str | int | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """out[m] = sum over slots s of topk_weights[m, s] * expert[topk_ids[m, s]](x[m]).

    Args:
        x: `[M, K]` bf16, fp16 or fp32 with unit stride along K; fp16 and fp32 are rounded to bf16 once.
        packed: the experts.
        topk_weights: `[M, topk]` float32, bf16 or fp16; None means ones.
        topk_ids: `[M, topk]` int32 or int64, global ids, -1 = no expert.
        activation: "silu", "gelu", "gelu_tanh", "swigluoai" or "relu2".
        expert_map: `[global_num_experts]` int32, contiguous, -1 = on another rank.
        out: `[M, K]` contiguous in x's dtype, or None for a new tensor. It may be x itself: every row of x has been read before the first row of
            the result is written, and a refused call writes nothing.
        isa: name or number of an instruction set; None = the active one.
        scratch: memory to work in, at least `layer_scratch_bytes`, on a cache line; None = the calling thread's own.

    Raises:
        OutOfMemory: scratch memory cannot be had; ArgumentError: `scratch` is too small.
        ExpertIdError: an id outside [0, global_num_experts) other than -1, with its position.

    Numerics: products accumulate in float32; the activation is computed in float32 and rounded to bf16; weights and sum in float32, slots in order;
    one rounding to x's dtype. The bits do not depend on the number of threads nor on the other tokens of the call.
    """
    if out is None:
        # empty_like is the quickest way to a tensor but copies strides.
        out = torch.empty_like(x) if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
    return layer(
        x, packed, topk_weights, topk_ids, out, native.REDUCED, activation, expert_map, None, isa, scratch
    )


def experts_unreduced(
    x: Tensor,
    packed: PackedExperts,
    topk_ids: Tensor,
    *,
    activation: str,
    expert_map: Tensor | None = None,
    out: Tensor | None = None,
    isa: str | int | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """out[m, s] = expert[topk_ids[m, s]](x[m]), `[M, topk, K]`; zero where the pair is skipped. Otherwise as `fused_experts`."""
    if out is None:
        out = torch.empty((x.shape[0], topk_ids.shape[1], x.shape[1]), dtype=x.dtype)
    return layer(x, packed, None, topk_ids, out, native.UNREDUCED, activation, expert_map, None, isa, scratch)


def experts_batched(
    x: Tensor,
    packed: PackedExperts,
    expert_num_tokens: Tensor,
    *,
    activation: str,
    out: Tensor | None = None,
    isa: str | int | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """out[e, i] = expert[e](x[e, i]) for i < expert_num_tokens[e], `[E, max_num_tokens, K]`; other rows of `out` are not written.

    Raises:
        ArgumentError: a count outside 0 .. max_num_tokens.
    """
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    counts = as_int32(expert_num_tokens)
    return layer(x, packed, None, None, out, native.BATCHED, activation, None, counts, isa, scratch)
