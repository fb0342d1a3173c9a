"""``torch.ops.moe_cpu.experts_into``: a layer on packed weights that writes where it is told, as one opaque operator.

vLLM brings the memory of the result, and its compiled graphs trace straight into the experts. So they find this operator there, which says that it writes.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from moe_cpu import ops, pack_ops
from moe_cpu.errors import dtype_error, shape_error
from moe_cpu.packing import PackedExperts

_library = torch.library.Library("moe_cpu", "FRAGMENT")
_library.define(
    "experts_into(Tensor(a!) out, Tensor x, Tensor w1, Tensor w2, Tensor? w1_bias, Tensor? w2_bias, int K, int I, str gate_layout, "
    "Tensor? topk_weights, Tensor topk_ids, Tensor? expert_map, str activation) -> ()"
)


@functools.cache
def _forms(E: int, K: int, I: int, gate_layout: str) -> tuple[tuple[torch.dtype, tuple[int, int]], ...]:
    """Dtype and shape of packed w1, w2 and their biases."""
    N = I if gate_layout == "none" else 2 * I
    return (
        (torch.bfloat16, (E, pack_ops.packed_elements(N, K, gate_layout))),
        (torch.bfloat16, (E, pack_ops.packed_elements(K, I, "none"))),
        (torch.float32, (E, N)),
        (torch.float32, (E, K)),
    )


def _packed(
    w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, K: int, I: int, gate_layout: str
) -> PackedExperts:
    """`PackedExperts.from_tensors`, which takes as long as a small layer, only for what it would refuse or copy.

    Looks every time and keeps nothing: weights that are loaded anew take the place of the old ones in the same parameters.
    """
    tensors = (w1, w2, w1_bias, w2_bias)
    for tensor, (dtype, shape) in zip(tensors, _forms(w1.shape[0], K, I, gate_layout), strict=True):
        if tensor is not None and not (
            tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous() and tensor.is_cpu
        ):
            return PackedExperts.from_tensors(*tensors, K, I, gate_layout)
    return PackedExperts(*tensors, K, I, gate_layout)


def _experts_into(
    out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, K: int, I: int,
    gate_layout: str, topk_weights: Tensor | None, topk_ids: Tensor, expert_map: Tensor | None, activation: str,
) -> None:  # fmt: skip
    if out.shape != x.shape:
        raise shape_error("out", "[M, K]", x.shape, out.shape)
    if out.dtype != x.dtype:
        raise dtype_error("out", "the dtype of hidden_states", out.dtype)
    packed = _packed(w1, w2, w1_bias, w2_bias, K, I, gate_layout)
    direct = out.is_contiguous()
    result = ops.fused_experts(
        x,
        packed,
        topk_weights,
        topk_ids,
        activation=activation,
        expert_map=expert_map,
        out=out if direct else None,
    )
    if not direct:
        out.copy_(result)


_library.impl("experts_into", _experts_into, "CPU")
torch.library.register_fake("moe_cpu::experts_into", lambda *_: None, lib=_library)

experts_into = torch.ops.moe_cpu.experts_into
