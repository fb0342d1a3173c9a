"""The reference backend: a loop over experts in plain torch, on any device, with a backward.

It is the definition the other backends are compared with, the path for weights that keep float32 or float16, and the
only one that computes gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_cpu.activations import activate
from moe_cpu.checks import (
    FLOAT_DTYPES,
    check_batched_call,
    check_call,
    check_no_scales,
    default_gate_layout,
    is_packed,
)
from moe_cpu.errors import dtype_name
from moe_cpu.experts.config import ExpertsConfig
from moe_cpu.experts.loop import result_memory, run_batched, run_routed
from moe_cpu.grouping import local_expert_ids
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute


class ReferenceExperts(FusedMoEPermuteExpertsUnpermute):
    """out[m, s] = act(x[m] @ w1[e].T + b1[e]) @ w2[e].T + b2[e] with e = topk_ids[m, s], one expert after the other.

    Numerics: operands are upcast and multiplied in float32; the activation is computed in float32 and rounded once to
    the dtype of the weights (bf16, fp16) before the second GEMM; the result stays float32. With bf16 weights, a float32
    or fp16 input is rounded to bf16 once. Float32 weights round nowhere; float64 weights compute in float64.
    Memory: temporaries of one expert, and every expert's result; a `PackedExperts` is unpacked on each call.
    """

    name = "reference"
    has_backward = True

    @classmethod
    def supports(cls, config: ExpertsConfig) -> tuple[bool, str]:
        """Every device, activation and floating-point dtype."""
        if config.weight_dtype not in FLOAT_DTYPES:
            return False, f"weights are {dtype_name(config.weight_dtype)}, expected bf16, fp16, fp32 or fp64"
        return True, ""

    def workspace_shapes(
        self, a: torch.Tensor, aq: torch.Tensor, M: int, N: int, K: int, topk: int, num_experts: int
    ) -> tuple[int, int, torch.dtype]:
        """Workspace13 takes the result; temporaries are torch's."""
        rows = aq.shape[0] * M if aq.dim() == 3 else M * topk
        return rows * K, 0, torch.float64 if aq.dtype == torch.float64 else torch.float32

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w1_zp: torch.Tensor | None = None,
        w2_zp: torch.Tensor | None = None,
        a1q_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        workspace13: torch.Tensor | None = None,
        workspace2: torch.Tensor | None = None,
        expert_num_tokens: torch.Tensor | None = None,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The unweighted result `[M, topk, K]` or `[E, max_num_tokens, K]`, float32; rows without an expert are zero.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError.
        """
        check_no_scales(
            w1_scale=w1_scale, w2_scale=w2_scale, w1_zp=w1_zp, w2_zp=w2_zp, a1q_scale=a1q_scale, a2_scale=a2_scale
        )  # fmt: skip
        if hidden_states.dim() == 3:
            check_batched_call(hidden_states, w1, w2, activation, expert_num_tokens, w1_bias, w2_bias)
        else:
            check_call(
                hidden_states, w1, w2, None, topk_ids, activation, False, global_num_experts, expert_map,
                w1_bias, w2_bias,
            )  # fmt: skip
        layer = _Layer(w1, w2, activation, w1_bias, w2_bias)
        E, K = layer.E, layer.K
        if hidden_states.dim() == 3:
            shape: tuple[int, ...] = (E, hidden_states.shape[1], K)
            out = result_memory(shape, layer.compute, hidden_states.device, workspace13)
            return run_batched(layer.expert, E, hidden_states, expert_num_tokens, out)
        local_ids = local_expert_ids(topk_ids, E, expert_map)
        shape = (*topk_ids.shape, K)
        out = result_memory(shape, layer.compute, hidden_states.device, workspace13)
        return run_routed(layer.expert, E, hidden_states, local_ids, out)


class _Layer:
    """The arithmetic of each expert of one call."""

    def __init__(
        self, w1: Any, w2: Any, activation: str, w1_bias: torch.Tensor | None, w2_bias: torch.Tensor | None
    ) -> None:
        self.activation = activation
        self.gate_layout = default_gate_layout(activation)
        if is_packed(w1, w2):
            self.gate_layout = w1.gate_layout
            w1_bias, w2_bias = w1.w1_bias, w1.w2_bias
            w1, w2 = w1.unpack()
        self.E, self.K = w2.shape[0], w2.shape[1]
        # Taking experts apart once keeps the backward linear in E: indexing would make a full-size gradient for each.
        self.w1_of, self.w2_of = w1.unbind(0), w2.unbind(0)
        self.b1_of = None if w1_bias is None else w1_bias.unbind(0)
        self.b2_of = None if w2_bias is None else w2_bias.unbind(0)
        self.dtype = w1.dtype
        self.compute = torch.float64 if w1.dtype == torch.float64 else torch.float32

    def expert(self, e: int, x: torch.Tensor) -> torch.Tensor:
        # Every bf16 kernel takes bf16 rows, so the definition rounds the rows too.
        x = (x.to(torch.bfloat16) if self.dtype == torch.bfloat16 else x).to(self.compute)
        h = x @ self.w1_of[e].to(self.compute).t()
        if self.b1_of is not None:
            h = h + self.b1_of[e].to(self.compute)
        a = activate(h, self.activation, self.gate_layout).to(self.dtype).to(self.compute)
        y = a @ self.w2_of[e].to(self.compute).t()
        return y if self.b2_of is None else y + self.b2_of[e].to(self.compute)
