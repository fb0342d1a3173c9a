"""``torch.ops.moe_cpu.experts_into``: a layer on packed weights that writes where it is told, as one opaque operator.

vLLM brings the memory of the result, and its compiled graphs trace straight into the experts. So they find this operator there, which says that it writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_cpu import ops
from moe_cpu.errors import dtype_error, shape_error
from moe_cpu.packing import PackedExperts

_library = torch.library.Library("moe_cpu", "FRAGMENT")
_library.define(
    "experts_into(Tensor(a!) out, Tensor x, Tensor w1, Tensor w2, Tensor? w1_bias, Tensor? w2_bias, int K, int I, str gate_layout, "
    "Tensor? topk_weights, Tensor topk_ids, Tensor? expert_map, str activation) -> ()"
)


def _experts_into(
    out: Tensor, x: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, K: int, I: int,
    gate_layout: str, topk_weights: Tensor | None, topk_ids: Tensor, expert_map: Tensor | None, activation: str,
) -> None:  # fmt: skip
    if out.shape != x.shape:
        raise shape_error("out", "[M, K]", x.shape, out.shape)
    if out.dtype != x.dtype:
        raise dtype_error("out", "the dtype of hidden_states", out.dtype)
    packed = PackedExperts.from_tensors(w1, w2, w1_bias, w2_bias, K, I, gate_layout)
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
