"""The modular kernel: the module that runs a layer's stages one after the other.

prepare (quantise, dispatch) -> experts.apply (permute, gemm1, activation, gemm2, unpermute) -> finalize (weight, sum)
"""

from __future__ import annotations

from typing import Any

import torch

from moe_cpu.checks import check_weight_on_input, moe_problem_size, resolve_num_experts
from moe_cpu.combine import without_expert
from moe_cpu.errors import device_error, shape_error
from moe_cpu.scratch import Scratch
from moe_cpu.stages import FusedMoEPermuteExpertsUnpermute, FusedMoEPrepareAndFinalize, PrepareResult
from moe_cpu.tensor_checks import check_own_memory

__all__ = [
    "FusedMoEModularKernel",
    "FusedMoEPermuteExpertsUnpermute",
    "FusedMoEPrepareAndFinalize",
    "PrepareResult",
    "_moe_problem_size",
]

_moe_problem_size = moe_problem_size


class FusedMoEModularKernel(torch.nn.Module):
    """One MoE layer: y[m] = sum over s of topk_weights[m, s] * expert[topk_ids[m, s]](x[m]), from two pluggable stages.

    Memory: the instance owns the scratch memory, one block for each calling thread, grown on demand and reused, so that
    a call allocates nothing but its result. One instance serves one layer.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
    ) -> None:
        super().__init__()
        self.prepare_finalize = prepare_finalize
        self.fused_experts = fused_experts
        self._scratch = Scratch()

    def forward(
        self,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        inplace: bool = False,
        activation: str = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w1_zp: torch.Tensor | None = None,
        w2_zp: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs prepare, the experts and finalize.

        Args:
            hidden_states: `[M, K]`.
            w1, w2: `[E, N, K]` and `[E, K, I]`, or a `PackedExperts` and None.
            topk_weights: `[M, topk]` float32, bf16 or fp16.
            topk_ids: `[M, topk]` int32 or int64, global ids, -1 = no expert.
            inplace: write the result into `hidden_states`, whose elements need memory of their own, and return it.
            global_num_experts: experts on all ranks; -1 = the length of `expert_map`, or E without one.
            expert_map: `[global_num_experts]` int32, global to local id, -1 = on another rank.
            w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale: passed on to the stages; those of this package take none.
            apply_router_weight_on_input: multiply the input instead of the output by the weight; topk must be 1.
            w1_bias, w2_bias: `[E, N]` and `[E, K]`; packed weights carry their own.
        Returns: `[M, K]` in the dtype of `hidden_states`.
        Raises: ShapeError, DeviceError, ArgumentError, ExpertIdError, OutOfMemory, and what the stages raise.
        Numerics: what the experts and finalize say; a pair without an expert here adds exactly zero, also when its weight is not finite.
        Memory: no input is modified (but `hidden_states` under `inplace`).
        """
        size = moe_problem_size(hidden_states, w1, w2, topk_ids)
        self._check_routing(hidden_states, size.K, topk_weights, topk_ids, apply_router_weight_on_input)
        if inplace:
            check_own_memory("hidden_states", hidden_states)
        num_experts = resolve_num_experts(global_num_experts, size.E, expert_map)
        bias = {} if w1_bias is None and w2_bias is None else {"w1_bias": w1_bias, "w2_bias": w2_bias}
        wanted = self.prepare_finalize.topk_indices_dtype()
        if wanted is not None and topk_ids.dtype != wanted:
            topk_ids = topk_ids.to(wanted)

        a1q, a1q_scale, expert_num_tokens, ids, weights = self.prepare_finalize.prepare(
            hidden_states, a1_scale, a2_scale, topk_weights, topk_ids, num_experts, expert_map,
            apply_router_weight_on_input,
        )  # fmt: skip
        topk_ids = topk_ids if ids is None else ids
        topk_weights = topk_weights if weights is None else weights
        output = (
            hidden_states
            if inplace
            else torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        )

        # A backward still reads what a recorded call computed after the next call has reused the scratch memory.
        recorded = torch.is_grad_enabled() and any(
            isinstance(t, torch.Tensor) and t.requires_grad
            for t in (a1q, topk_weights, w1, w2, w1_bias, w2_bias)
        )
        scratch = Scratch() if recorded else self._scratch
        if a1q.numel() == 0:
            # No token reached this rank: its experts have nothing to do, but others may still wait for its finalize.
            output.zero_()
            shape = a1q.shape if a1q.dim() == 3 else (0, topk_ids.shape[1], size.K)
            result = a1q.new_empty(shape, dtype=hidden_states.dtype)
        elif self._weights_and_reduces(a1q):
            # The experts may still read a row of their input after they wrote the same row of their output.
            direct = not inplace and a1q.shape == output.shape
            result = output if direct else scratch.reduced(a1q, output.dtype)
            self.fused_experts.apply_weighted(
                result, a1q, w1, w2, topk_weights, topk_ids, activation, num_experts, expert_map,
                apply_router_weight_on_input, **bias,
            )  # fmt: skip
        else:
            rows = moe_problem_size(a1q, w1, w2, topk_ids).M
            n13, n2, dtype = self.fused_experts.workspace_shapes(
                hidden_states, a1q, rows, size.N, size.K, topk_ids.shape[1], num_experts
            )
            workspace13, workspace2 = scratch.workspaces(n13, n2, dtype, a1q.device)
            result = self.fused_experts.apply(
                a1q, w1, w2, topk_ids, activation, num_experts, expert_map, w1_scale, w2_scale, w1_zp, w2_zp,
                a1q_scale, a2_scale, workspace13, workspace2, expert_num_tokens, **bias,
            )  # fmt: skip
            if expert_map is not None and ids is None:
                # finalize does not see the map, and zero times a weight that is not finite would not be zero.
                topk_weights = topk_weights.masked_fill(without_expert(topk_ids, expert_map), 0.0)
        self.prepare_finalize.finalize(output, result, topk_weights, topk_ids, apply_router_weight_on_input)
        return output

    def _weights_and_reduces(self, a1q: torch.Tensor) -> bool:
        return (
            a1q.dim() == 2
            and self.fused_experts.can_weight_and_reduce()
            and self.prepare_finalize.accepts_reduced()
        )

    @staticmethod
    def _check_routing(
        x: torch.Tensor, K: int, topk_weights: torch.Tensor, topk_ids: torch.Tensor, on_input: bool
    ) -> None:
        if x.dim() != 2:
            raise shape_error("hidden_states", "[M, K]", (), x.shape, hint="prepare makes the batched form")
        if x.shape[1] != K:
            hint = "K is w2.size(1), the hidden size"
            raise shape_error("hidden_states", "[M, K]", (x.shape[0], K), x.shape, hint=hint)
        if topk_weights.shape != topk_ids.shape:
            raise shape_error("topk_weights", "[M, topk]", tuple(topk_ids.shape), topk_weights.shape)
        for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
            if tensor.device != x.device:
                raise device_error(name, x.device, tensor.device)
        check_weight_on_input(on_input, topk_ids.shape[1])
