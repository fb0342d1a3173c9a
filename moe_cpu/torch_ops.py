"""``torch.ops.moe_cpu``: the native operations as torch operators with fake kernels, for graphs.

``torch.compile(fullgraph=True)`` sees each as one opaque node. Eager calls do not pass here (`moe_cpu.ops`): the dispatcher costs more microseconds than
a small layer takes. Weights appear as the tensors of a `PackedExperts`, and every operator checks all of its arguments: nobody else stands before it. The whole layer on any backend is one more operator, in `moe_cpu.graph_op`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_cpu import align_ops, ops, pack_ops
from moe_cpu.align import moe_align_block_size
from moe_cpu.checks import check_batched_call, check_call
from moe_cpu.errors import ArgumentError, ShapeError, dtype_error
from moe_cpu.int32 import as_int32
from moe_cpu.native_library import GATE_LAYOUT_CODES
from moe_cpu.pack_build import Matrices, check_even
from moe_cpu.packing import PackedExperts
from moe_cpu.tensor_checks import check_one_device

_library = torch.library.Library("moe_cpu", "DEF")

_PACKED = "Tensor w1, Tensor w2, Tensor? w1_bias, Tensor? w2_bias, int K, int I, str gate_layout"
_SCHEMAS = {
    "fused_experts": f"(Tensor x, {_PACKED}, Tensor? topk_weights, Tensor topk_ids, Tensor? expert_map, str activation) -> Tensor",
    "experts_unreduced": f"(Tensor x, {_PACKED}, Tensor topk_ids, Tensor? expert_map, str activation) -> Tensor",
    "experts_batched": f"(Tensor x, {_PACKED}, Tensor expert_num_tokens, str activation) -> Tensor",
    "moe_align_block_size": "(Tensor topk_ids, int block_size, int num_experts, Tensor? expert_map, bool pad_sorted_ids) "
    "-> (Tensor, Tensor, Tensor)",
    "pack_expert": "(Tensor dense, str gate_layout) -> Tensor",
    "unpack_expert": "(Tensor packed, int rows, int cols, str gate_layout) -> Tensor",
}


def _fused_experts(
    x: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, K: int, I: int, gate_layout: str,
    topk_weights: Tensor | None, topk_ids: Tensor, expert_map: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    packed = PackedExperts.from_tensors(w1, w2, w1_bias, w2_bias, K, I, gate_layout)
    check_call(x, packed, None, topk_weights, topk_ids, activation, False, -1, expert_map)
    if topk_ids.numel() == 0:
        return torch.zeros(x.shape, dtype=x.dtype)
    if topk_weights is not None and topk_weights.dtype == torch.float64:
        topk_weights = topk_weights.float()
    return ops.fused_experts(
        x, packed, topk_weights, topk_ids, activation=activation, expert_map=_as_map(expert_map)
    )


def _experts_unreduced(
    x: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, K: int, I: int, gate_layout: str,
    topk_ids: Tensor, expert_map: Tensor | None, activation: str,
) -> Tensor:  # fmt: skip
    packed = PackedExperts.from_tensors(w1, w2, w1_bias, w2_bias, K, I, gate_layout)
    check_call(x, packed, None, None, topk_ids, activation, False, -1, expert_map)
    if topk_ids.numel() == 0:
        return torch.empty((*topk_ids.shape, K), dtype=x.dtype)
    return ops.experts_unreduced(x, packed, topk_ids, activation=activation, expert_map=_as_map(expert_map))


def _experts_batched(
    x: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, K: int, I: int, gate_layout: str,
    expert_num_tokens: Tensor, activation: str,
) -> Tensor:  # fmt: skip
    packed = PackedExperts.from_tensors(w1, w2, w1_bias, w2_bias, K, I, gate_layout)
    check_batched_call(x, packed, None, activation, expert_num_tokens)
    # An operator's result is defined everywhere, so rows without a token are zero here.
    out = torch.zeros(x.shape, dtype=x.dtype)
    if out.numel() == 0:
        return out
    return ops.experts_batched(x, packed, expert_num_tokens, activation=activation, out=out)


def _as_map(expert_map: Tensor | None) -> Tensor | None:
    return None if expert_map is None else as_int32("expert_map", expert_map)


def _align(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor | None, pad_sorted_ids: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return moe_align_block_size(topk_ids, block_size, num_experts, expert_map, pad_sorted_ids)


def _check_layout(gate_layout: str) -> None:
    if gate_layout not in GATE_LAYOUT_CODES:
        raise ArgumentError(
            f"gate_layout: expected one of {', '.join(GATE_LAYOUT_CODES)}, got {gate_layout!r}"
        )


def _pack_expert(dense: Tensor, gate_layout: str) -> Tensor:
    _check_layout(gate_layout)
    (matrix,) = Matrices("dense", [dense], None)
    check_even(matrix, gate_layout)
    rows, cols = matrix.shape
    packed = torch.empty(pack_ops.packed_elements(rows, cols, gate_layout), dtype=torch.bfloat16)
    pack_ops.pack_expert(matrix, gate_layout, packed)
    return packed


def _unpack_expert(packed: Tensor, rows: int, cols: int, gate_layout: str) -> Tensor:
    _check_layout(gate_layout)
    if packed.dtype != torch.bfloat16:
        raise dtype_error("packed", "bf16", packed.dtype)
    if rows < 1 or cols < 1 or (gate_layout != "none" and rows % 2):
        raise ShapeError(
            f"rows, cols: expected at least 1, and an even number of rows with a gate, got {rows}, {cols}"
        )
    elements = pack_ops.packed_elements(rows, cols, gate_layout)
    if packed.numel() != elements:
        raise ShapeError(f"packed: expected {elements} elements for [{rows}, {cols}], got {packed.numel()}")
    return pack_ops.unpack_expert(packed.contiguous(), rows, cols, gate_layout)


def _like_input(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_unreduced(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    b1: object,
    b2: object,
    K: int,
    I: int,
    layout: str,
    topk_ids: Tensor,
    *_: object,
) -> Tensor:
    return x.new_empty((topk_ids.shape[0], topk_ids.shape[1], x.shape[1]))


def _fake_align(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: object, pad_sorted_ids: bool
) -> tuple[Tensor, ...]:
    length = align_ops.aligned_length(topk_ids.numel(), block_size, num_experts, pad_sorted_ids)
    return tuple(topk_ids.new_empty(n, dtype=torch.int32) for n in (length, -(-length // block_size), 1))


def _fake_pack(dense: Tensor, gate_layout: str) -> Tensor:
    return dense.new_empty(
        pack_ops.packed_elements(int(dense.shape[0]), int(dense.shape[1]), gate_layout), dtype=torch.bfloat16
    )


def _fake_unpack(packed: Tensor, rows: int, cols: int, gate_layout: str) -> Tensor:
    return packed.new_empty((rows, cols))


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "fused_experts": (_fused_experts, _like_input),
    "experts_unreduced": (_experts_unreduced, _fake_unreduced),
    "experts_batched": (_experts_batched, _like_input),
    "moe_align_block_size": (_align, _fake_align),
    "pack_expert": (_pack_expert, _fake_pack),
    "unpack_expert": (_unpack_expert, _fake_unpack),
}


def _on_one_device(fake: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*arguments: Any) -> Any:
        check_one_device(*arguments)
        return fake(*arguments)

    return checked


for _name, _schema in _SCHEMAS.items():
    _kernel, _fake = _KERNELS[_name]
    _library.define(_name + _schema)
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"moe_cpu::{_name}", _on_one_device(_fake), lib=_library)
_library.impl("moe_align_block_size", _align, "CUDA")
