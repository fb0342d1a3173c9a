"""Everything on one rank: nothing is sent, nothing is quantised."""

from __future__ import annotations

import torch

from moe_cpu.checks import check_no_scales, check_weight_on_input
from moe_cpu.combine import weight_and_reduce, weight_input
from moe_cpu.errors import shape_error
from moe_cpu.modular_kernel import FusedMoEPrepareAndFinalize, PrepareResult


class MoEPrepareAndFinalizeNoEP(FusedMoEPrepareAndFinalize):
    """Passes the tokens on as they are, and weights and sums what comes back."""

    def prepare(
        self,
        a1: torch.Tensor,
        a1_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> PrepareResult:
        """Returns `a1` itself, or a new `a1 * topk_weights` rounded once when the weight goes on the input.

        Raises: ArgumentError for a weight on the input with topk != 1, and for activation scales.
        """
        check_no_scales(a1_scale=a1_scale, a2_scale=a2_scale)
        if apply_router_weight_on_input:
            check_weight_on_input(True, topk_ids.shape[1])
            a1 = weight_input(a1, topk_weights)
        return PrepareResult(a1)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Weights and sums `[M, topk, K]`; copies what is already reduced `[M, K]`; an empty result gives zeros.

        A slot with id -1 adds exactly zero. The ids are global ones and no map comes here, so the caller has made the weights of remote experts zero,
        as `FusedMoEModularKernel` does.

        Raises: ShapeError when the result is neither.
        Numerics: weights and sum in float32, slots in order, one rounding.
        """
        if fused_expert_output is output:
            return
        M, K = output.shape
        shape = tuple(fused_expert_output.shape)
        if shape == (M, topk_ids.shape[1], K):
            weight_and_reduce(
                output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
            )
        elif shape == (M, K):
            output.copy_(fused_expert_output)
        elif fused_expert_output.numel() == 0:
            output.zero_()
        else:
            raise shape_error(
                "fused_expert_output",
                "[M, topk, K]",
                (M, topk_ids.shape[1], K),
                shape,
                hint="or [M, K] when the experts already weighted and summed",
            )

    def topk_indices_dtype(self) -> torch.dtype | None:
        """No preference."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """No limit."""
        return None

    def accepts_reduced(self) -> bool:
        """Yes: a reduced result is the output."""
        return True
