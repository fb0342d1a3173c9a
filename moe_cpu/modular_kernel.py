"""The modular kernel interface: two abstract stages, and the module that runs them one after the other.

    prepare (quantise, dispatch) -> experts.apply (permute, gemm1, activation, gemm2, unpermute) -> finalize (weight, sum)

Names, argument order and defaults follow the interface that vLLM 0.9.1 published, so stages written for it can be
plugged in. Additions are optional capabilities with a default that keeps the published behaviour.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_cpu.activations import activate_into
from moe_cpu.checks import (
    check_weight_on_input,
    moe_problem_size,
    resolve_num_experts,
)
from moe_cpu.errors import device_error, shape_error
from moe_cpu.scratch import Scratch

if TYPE_CHECKING:
    from moe_cpu.experts.config import ExpertsConfig

_moe_problem_size = moe_problem_size


class PrepareResult(NamedTuple):
    """What `prepare` returns; everything but the activations may be None.

    a1q: `[M', K]` tokens for the local experts, or batched `[E, max_num_tokens, K]`.
    a1q_scale: scale of a quantised `a1q`.
    expert_num_tokens: `[E]` int32, real rows of each expert, with batched activations.
    dispatched_topk_ids, dispatched_topk_weights: `[M', topk]`, replace the caller's in apply and finalize.
    """

    a1q: torch.Tensor
    a1q_scale: torch.Tensor | None = None
    expert_num_tokens: torch.Tensor | None = None
    dispatched_topk_ids: torch.Tensor | None = None
    dispatched_topk_weights: torch.Tensor | None = None


class FusedMoEPrepareAndFinalize(ABC):
    """First and last stage of a layer: everything that depends on where tokens and experts live."""

    @abstractmethod
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
    ) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
    ]:
        """Quantises `a1 [M, K]` and sends tokens to the ranks of their experts.

        Args:
            num_experts: global number of experts.
            expert_map: `[num_experts]` int32, -1 = on another rank; None = all here.
            apply_router_weight_on_input: multiply the activations by the router weight, before any
                quantisation; topk must be 1.
        Returns: a `PrepareResult` or a plain 5-tuple of the same order.
        """

    @abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes `output [M, K]` from the experts' result, after any receive.

        output[m] = sum over slots s of topk_weights[m, s] * fused_expert_output[m, s], without the weight when it went
        on the input.

        Args:
            fused_expert_output: `[M, topk, K]` unweighted, batched `[E, max_num_tokens, K]`, or, only for a class whose
                `accepts_reduced()` is true, already weighted and summed `[M, K]`, possibly `output` itself.
        """

    @abstractmethod
    def topk_indices_dtype(self) -> torch.dtype | None:
        """The integer dtype that `prepare` needs for ids, or None for no preference."""

    @abstractmethod
    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens one rank may bring to a batched implementation, or None for no limit."""

    def accepts_reduced(self) -> bool:
        """Whether `finalize` takes a result that the experts already weighted and summed over topk."""
        return False


class FusedMoEPermuteExpertsUnpermute(ABC):
    """Middle stage of a layer: the experts' GEMMs on one rank."""

    @abstractmethod
    def workspace_shapes(
        self,
        a: torch.Tensor,
        aq: torch.Tensor,
        M: int,
        N: int,
        K: int,
        topk: int,
        num_experts: int,
    ) -> tuple[int, int, torch.dtype]:
        """Elements of workspace13 (either GEMM's output), of workspace2 (the activation's output), and their dtype."""

    def activation(self, activation: str, output: torch.Tensor, input: torch.Tensor) -> None:
        """Writes act(gate) * up of `input [..., 2 * I]` to `output [..., I]`: float32 inside, one rounding.

        Raises: ValueError naming an unknown activation and the known ones.
        """
        activate_into(activation, output, input)

    @abstractmethod
    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        w1_scale: torch.Tensor | None,
        w2_scale: torch.Tensor | None,
        w1_zp: torch.Tensor | None,
        w2_zp: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_num_tokens: torch.Tensor | None,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The unweighted, unreduced result `[M, topk, K]`, or `[E, max_num_tokens, K]` for batched `hidden_states`.

        A pair whose id is -1 or whose expert is on another rank reads exactly zero.

        Args:
            topk_ids: `[M, topk]` global ids.
            workspace13, workspace2: flat scratch of the sizes that `workspace_shapes` asked for; its content before the
                call is undefined, and the result may live in it.
            expert_num_tokens: `[E]`, real rows of each expert, with batched input.
            w1_bias, w2_bias: `[E, N]`, `[E, K]`; passed only when the layer has biases.
        """

    def supports(self, config: ExpertsConfig) -> tuple[bool, str]:
        """Whether this implementation can run the configuration here, and if not, a sentence that says why."""
        return True, ""

    def can_weight_and_reduce(self) -> bool:
        """Whether `apply_weighted` exists, which saves one write and one read of M * topk * K elements."""
        return False

    def apply_weighted(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> None:
        """Writes the weighted sum over topk to `output [M, K]`, which never overlaps `hidden_states`.

        Args:
            apply_router_weight_on_input: `hidden_states` already carry the weight (prepare put it there), so the sum is
                taken without it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not weight and reduce; call apply")


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
            inplace: write the result into `hidden_states` and return it.
            global_num_experts: experts on all ranks; -1 = the length of `expert_map`, or E without one.
            expert_map: `[global_num_experts]` int32, global to local id, -1 = on another rank.
            apply_router_weight_on_input: multiply the input instead of the output by the weight; topk must be 1.
        Returns: `[M, K]` in the dtype of `hidden_states`.
        Raises: ShapeError, DeviceError, ArgumentError, ExpertIdError, and what the stages raise.
        """
        size = moe_problem_size(hidden_states, w1, w2, topk_ids)
        self._check_routing(hidden_states, topk_weights, topk_ids, apply_router_weight_on_input)
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

        if a1q.numel() == 0:
            # No token reached this rank: its experts have nothing to do, but others may still wait for its finalize.
            output.zero_()
            shape = a1q.shape if a1q.dim() == 3 else (0, topk_ids.shape[1], size.K)
            result = a1q.new_empty(shape, dtype=hidden_states.dtype)
        elif self._weights_and_reduces(a1q):
            # The experts may still read a row of their input after they wrote the same row of their output.
            direct = not inplace and a1q.shape == output.shape
            result = output if direct else self._scratch.reduced(a1q, output.dtype)
            self.fused_experts.apply_weighted(
                result, a1q, w1, w2, topk_weights, topk_ids, activation, num_experts, expert_map,
                apply_router_weight_on_input, **bias,
            )  # fmt: skip
        else:
            rows = moe_problem_size(a1q, w1, w2, topk_ids).M
            n13, n2, dtype = self.fused_experts.workspace_shapes(
                hidden_states, a1q, rows, size.N, size.K, topk_ids.shape[1], num_experts
            )
            workspace13, workspace2 = self._scratch.workspaces(n13, n2, dtype, a1q.device)
            result = self.fused_experts.apply(
                a1q, w1, w2, topk_ids, activation, num_experts, expert_map, w1_scale, w2_scale, w1_zp, w2_zp,
                a1q_scale, a2_scale, workspace13, workspace2, expert_num_tokens, **bias,
            )  # fmt: skip
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
        x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, on_input: bool
    ) -> None:
        if x.dim() != 2:
            raise shape_error("hidden_states", "[M, K]", (), x.shape, hint="prepare makes the batched form")
        if topk_weights.shape != topk_ids.shape:
            raise shape_error("topk_weights", "[M, topk]", tuple(topk_ids.shape), topk_weights.shape)
        for name, tensor in (("topk_weights", topk_weights), ("topk_ids", topk_ids)):
            if tensor.device != x.device:
                raise device_error(name, x.device, tensor.device)
        check_weight_on_input(on_input, topk_ids.shape[1])
