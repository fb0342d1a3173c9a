"""One layer call by the native library, as typed Python functions that go straight to C.

Arguments are checked here, but memory that a caller brings is trusted. What only the data can tell, an expert id out of range, the native code checks
before it writes anything. The same as torch operators, for graphs: `moe_cpu.torch_ops`. Packing: `moe_cpu.pack_ops`; sorting ids: `moe_cpu.align_ops`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_cpu import native_library as native
from moe_cpu.checks import ACTIVATION_WIDTH, check_call
from moe_cpu.errors import ArgumentError, IsaUnavailable, dtype_name, no_memory_error
from moe_cpu.int32 import as_int32
from moe_cpu.scratch import CallMemory
from moe_cpu.tensor_checks import refuse_tracing

if TYPE_CHECKING:
    from moe_cpu.packing import PackedExperts

_INT32 = native.DTYPE_CODES[torch.int32]  # numbers below it are floating point's
# moe_layer_args of c_api.h: 24 words of 64 bits, then 8 of 32.
_LAYER_ARGS = struct.Struct("=24q8i")


_mine = CallMemory()
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
    """Names of the instruction sets the library has kernels for, by their numbers; empty without a library."""
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


def borrow() -> CallMemory:
    """The calling thread's memory, busy until the caller says otherwise; a call in the middle of another (signal handler) gets its own, as it may grow it."""
    mine = CallMemory() if _mine.busy else _mine
    mine.busy = True
    return mine


def scratch_bytes_held() -> int:
    """Bytes of scratch memory the calling Python thread holds for its calls."""
    return _mine.scratch_bytes


def layer(
    x: Tensor, packed: PackedExperts, topk_weights: Tensor | None, topk_ids: Tensor | None, out: Tensor | None, mode: int,
    activation: str, expert_map: Tensor | None = None, expert_num_tokens: Tensor | None = None, isa: str | int | None = None,
    scratch: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """One native layer call in one of its three modes: see `fused_experts`, `experts_unreduced` and `experts_batched`, which has no `topk_ids`.

    Looks at every argument once, to check and to pass it on: a layer of one token takes little longer than that. `out`, `expert_num_tokens` and
    `scratch` are trusted; without an `out` a new tensor takes the reduced result.

    Returns: `out`; None, with nothing done, when the kernels cannot take some argument as it is, be it wrong or only unusual.
    Raises: as `fused_experts`, for what only the data can tell.
    """
    codes = native.DTYPE_CODES
    try:
        K, x_dtype = packed.K, codes[x.dtype]
        good = (ACTIVATION_WIDTH[activation] == 1) == (packed.gate_layout == "none")
        if topk_ids is None:
            _, tokens, columns = x.shape
            x_expert, x_token, x_column = x.stride()
            ids_shape, topk, ids_token, ids_slot, ids_dtype = None, 1, 0, 0, _INT32
        else:
            tokens, columns = x.shape
            x_token, x_column = x.stride()
            x_expert, ids_shape = 0, topk_ids.shape
            rows, topk = ids_shape
            ids_token, ids_slot = topk_ids.stride()
            ids_dtype = codes[topk_ids.dtype]
            good = good and rows == tokens and topk > 0 and ids_dtype >= _INT32 and topk_ids.is_cpu
        if topk_weights is None:
            weights_token = weights_slot = weights_dtype = 0
        else:
            weights_token, weights_slot = topk_weights.stride()
            weights_dtype = codes[topk_weights.dtype]
            good = good and topk_weights.shape == ids_shape and weights_dtype < _INT32
            good = good and topk_weights.is_cpu and not topk_weights.is_neg()
        if expert_map is None:
            global_experts = packed.E
        else:
            (global_experts,) = expert_map.shape
            good = (
                good and expert_map.dtype == torch.int32 and expert_map.is_contiguous() and expert_map.is_cpu
                and not expert_map.is_neg()
            )  # fmt: skip
        # Under torch.jit.trace sizes are tensors: the caller refuses that.
        good = (
            good
            and type(columns) is int
            and columns == K
            and (x_column == 1 or K == 1)
            and x_dtype < _INT32
            and x.is_cpu
        )
        if not good or x.is_neg() or (topk_ids is not None and topk_ids.is_neg()):
            return None
        x_address, w1_address, w2_address = x.data_ptr(), packed._w1.data_ptr(), packed._w2.data_ptr()
        ids_address = 0 if topk_ids is None else topk_ids.data_ptr()
        weights_address = 0 if topk_weights is None else topk_weights.data_ptr()
        map_address = 0 if expert_map is None else expert_map.data_ptr()
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
        return None
    if out is None:
        # empty_like is the quickest way to a tensor but copies strides.
        compact = x_token == K and x_column == 1
        out = torch.empty_like(x) if compact else torch.empty((tokens, K), dtype=x.dtype)
    w1_bias, w2_bias = packed._w1_bias, packed._w2_bias  # past the properties: this is the hot path
    out_address = out.data_ptr()
    if tokens > 0 and not (
        x_address and out_address and w1_address and w2_address and (ids_address or topk_ids is None)
        and (weights_address or topk_weights is None) and (map_address or expert_map is None or global_experts == 0)
    ):  # fmt: skip
        raise no_memory_error("fused experts")
    call = native.library().moe_layer
    index = active_isa() if isa is None else _isa_index(isa)
    mine = borrow()
    try:
        while True:
            status = call(_LAYER_ARGS.pack(
                tokens, K, packed.I, packed.E, topk, global_experts,
                x_address, x_expert, x_token,
                ids_address, ids_token, ids_slot, weights_address, weights_token, weights_slot,
                map_address,
                0 if expert_num_tokens is None else expert_num_tokens.data_ptr(),
                w1_address, w2_address,
                0 if w1_bias is None else w1_bias.data_ptr(), 0 if w2_bias is None else w2_bias.data_ptr(),
                out_address,
                mine.scratch_address if scratch is None else scratch.data_ptr(),
                mine.scratch_bytes if scratch is None else scratch.nbytes,
                x_dtype, ids_dtype, weights_dtype,
                native.ACTIVATION_CODES[activation], packed.gate_layout_code, mode, index, torch.get_num_threads(),
            ), mine.info_address)  # fmt: skip
            if status == 0:
                return out
            if status != native.SCRATCH_TOO_SMALL:
                raise native.failure(status, mine.info, "fused experts", topk)
            if scratch is not None:
                raise ArgumentError(
                    f"workspace2: expected at least {-(-mine.info[0] // scratch.element_size())} elements of {dtype_name(scratch.dtype)}, "
                    f"got {scratch.numel()}; size it with workspace_shapes"
                )
            mine.grow(mine.info[0])
    finally:
        mine.busy = False


def _routed(
    x: Tensor, packed: PackedExperts, topk_weights: Tensor | None, topk_ids: Tensor, out: Tensor | None, mode: int,
    activation: str, expert_map: Tensor | None, isa: str | int | None, scratch: Tensor | None,
) -> Tensor:  # fmt: skip
    """`layer` for any arguments: what is only unusual gets the usual form, and the rest is explained."""
    done = layer(x, packed, topk_weights, topk_ids, out, mode, activation, expert_map, None, isa, scratch)
    if done is not None:
        return done
    refuse_tracing()
    check_call(x, packed, None, topk_weights, topk_ids, activation, False, -1, expert_map)
    for name, tensor in (("hidden_states", x), ("topk_weights", topk_weights), ("topk_ids", topk_ids)):
        if tensor is not None and tensor.layout != torch.strided:
            raise ArgumentError(
                f"{name}: expected layout torch.strided, got {tensor.layout}; pass {name}.to_dense()"
            )
    if topk_ids.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype) if out is None else out.zero_()
    if topk_weights is not None:
        topk_weights = topk_weights.resolve_neg()
        topk_weights = topk_weights.float() if topk_weights.dtype == torch.float64 else topk_weights
    expert_map, x = (
        None if expert_map is None else as_int32("expert_map", expert_map),
        x.resolve_neg().contiguous(),
    )
    topk_ids = topk_ids.resolve_neg()
    done = layer(x, packed, topk_weights, topk_ids, out, mode, activation, expert_map, None, isa, scratch)
    if done is None:
        raise no_memory_error("fused experts")  # of a kind that does not even have an address, as functorch's
    return done


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
    x: Tensor, packed: PackedExperts, topk_weights: Tensor | None, topk_ids: Tensor, *, activation: str,
    expert_map: Tensor | None = None, out: Tensor | None = None, isa: str | int | None = None, scratch: Tensor | None = None,
) -> Tensor:  # fmt: skip
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
    return _routed(
        x, packed, topk_weights, topk_ids, out, native.REDUCED, activation, expert_map, isa, scratch
    )


def experts_unreduced(
    x: Tensor, packed: PackedExperts, topk_ids: Tensor, *, activation: str, expert_map: Tensor | None = None,
    out: Tensor | None = None, isa: str | int | None = None, scratch: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[m, s] = expert[topk_ids[m, s]](x[m]), `[M, topk, K]`; zero where the pair is skipped. Otherwise as `fused_experts`."""
    if out is None:
        out = torch.empty((x.shape[0], topk_ids.shape[1], x.shape[1]), dtype=x.dtype)
    return _routed(x, packed, None, topk_ids, out, native.UNREDUCED, activation, expert_map, isa, scratch)


def experts_batched(
    x: Tensor, packed: PackedExperts, expert_num_tokens: Tensor, *, activation: str, out: Tensor | None = None,
    isa: str | int | None = None, scratch: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[e, i] = expert[e](x[e, i]) for i < expert_num_tokens[e], `[E, max_num_tokens, K]`; other rows of `out` are not written.

    Raises:
        ArgumentError: a count outside 0 .. max_num_tokens.
    """
    refuse_tracing()
    out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    counts, x = as_int32("expert_num_tokens", expert_num_tokens, ArgumentError), x.resolve_neg()
    x = x if x.stride(-1) == 1 else x.contiguous()
    done = layer(x, packed, None, None, out, native.BATCHED, activation, None, counts, isa, scratch)
    assert done is not None, "checked by check_batched_call"
    return done
