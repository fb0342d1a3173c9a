"""The two pluggable stages of a layer, as abstract classes.

Names, argument order and defaults follow the interface that vLLM 0.9.1 published, so stages written for it can be
plugged in. Additions are optional capabilities with a default that keeps the published behaviour.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from moe_cpu.activations import activate_into

if TYPE_CHECKING:
    from moe_cpu.experts.config import ExpertsConfig


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
            a1: `[M, K]` bf16, fp16 or fp32; not modified.
            a1_scale, a2_scale: scales of a quantising implementation, else None.
            topk_weights: `[M, topk]` float32, bf16 or fp16.
            topk_ids: `[M, topk]` in the dtype of `topk_indices_dtype`, else int32 or int64; global ids, -1 = no expert.
            num_experts: global number of experts.
            expert_map: `[num_experts]` int32, -1 = on another rank; None = all here.
            apply_router_weight_on_input: multiply the activations by the router weight, before any
                quantisation; topk must be 1.
        Returns: a `PrepareResult` or a plain 5-tuple of the same order.
        Raises: ArgumentError for a weight on the input with topk != 1, and what the implementation cannot take.
        Numerics: a weighted input is multiplied in float32 and rounded once.
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
            output: `[M, K]`, written whole; its content before does not matter.
            topk_weights, topk_ids: `[M, topk]`, those that `prepare` returned or else the caller's. A slot with id -1 adds exactly zero; the weight
                of a remote expert's slot reads zero.
            fused_expert_output: `[M, topk, K]` unweighted, batched `[E, max_num_tokens, K]`, or, only for a class whose
                `accepts_reduced()` is true, already weighted and summed `[M, K]`, possibly `output` itself. Empty when no token came here.
        Raises: ShapeError for a result of another form.
        Numerics: weights and sum in float32 (float64 for float64), slots in order, one rounding to the dtype of `output`.
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
    """Middle stage of a layer: the experts' GEMMs on one rank.

    name: the word for this implementation in messages and listings. has_backward: whether gradients flow through it.
    """

    name: str = "unnamed"
    has_backward: bool = False

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
        """Elements of workspace13 (either GEMM's output), of workspace2 (the activation's output), and their dtype.

        Args:
            a, aq: the activations before and after `prepare`: `[M, K]`, `aq` also batched `[E, max_num_tokens, K]`.
            M: rows of `aq`, max_num_tokens when it is batched.
            N, K, topk: width of w1, hidden size, experts per token.
            num_experts: experts on all ranks.
        Memory: the kernel keeps one block for each thread that is large enough for the most it was ever asked for.
        """

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
            hidden_states: `[M, K]`, or batched `[E, max_num_tokens, K]`; not modified.
            w1, w2: `[E, N, K]` and `[E, K, I]`, or a `PackedExperts` and None.
            topk_ids: `[M, topk]` int32 or int64, global ids, -1 = no expert; of no meaning with batched input.
            activation: silu, gelu (erf), gelu_tanh, swigluoai or relu2.
            global_num_experts: experts on all ranks; -1 = the length of `expert_map`, or E without one.
            expert_map: `[global_num_experts]` int32, global to local id, -1 = on another rank.
            w1_scale, w2_scale, w1_zp, w2_zp, a1q_scale, a2_scale: for quantised weights and activations, else None.
            workspace13, workspace2: flat scratch of the sizes that `workspace_shapes` asked for; its content before the
                call is undefined, and the result may live in it.
            expert_num_tokens: `[E]`, real rows of each expert, with batched input.
            w1_bias, w2_bias: `[E, N]`, `[E, K]`; passed only when the layer has biases.
        Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError.
        Numerics: float32 accumulation; the activation in float32, rounded once to the weights' dtype; the class says what it does otherwise.
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
            output: `[M, K]`, written whole.
            hidden_states, w1, w2, topk_ids, activation, global_num_experts, expert_map, w1_bias, w2_bias: as in `apply`.
            topk_weights: `[M, topk]` float32, bf16 or fp16.
            apply_router_weight_on_input: `hidden_states` already carry the weight (prepare put it there), so the sum is
                taken without it.
        Raises: as `apply`; NotImplementedError where `can_weight_and_reduce()` is false.
        Numerics: as `apply`; weights and sum in float32, one rounding to the dtype of `output`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not weight and reduce; call apply")
