"""Our kernels as one of vLLM's experts classes, and thereby the capabilities that vLLM asks about."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from moe_cpu import isa
from moe_cpu.errors import IsaUnavailable
from moe_cpu.integrations.vllm import weights
from moe_cpu.integrations.vllm.kinds import KINDS, Kind, why_not
from moe_cpu.integrations.vllm.op import experts_into


class MoeCpuExperts(mk.FusedMoEExpertsModular):
    """out[m] = sum over s of topk_weights[m, s] * (act(x[m] @ w13[e].T + b13[e]) @ w2[e].T + b2[e]), e = topk_ids[m, s].

    bf16 weights that `process_weights_after_loading` packed; any hidden and intermediate size, tensor and expert parallel.

    Numerics: as `moe_cpu.fused_experts`; the bits do not depend on the other tokens of a batch nor on the number of threads.
    Memory: no workspace of vLLM's; scratch memory belongs to the calling thread and is shared by all layers.
    """

    # -- what it can do -------------------------------------------------------------------------------------------------------------------
    @staticmethod
    def is_supported_config(
        cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
    ) -> tuple[bool, str | None]:
        """What vLLM asks of any experts, and then what its predicates do not see: the dtype and the numbers of a clamped gate."""
        supported, reason = mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        if not supported:
            return False, reason
        reason = why_not(moe_config)
        return reason is None, reason

    @staticmethod
    def _supports_current_device() -> bool:
        try:
            isa.resolve()
        except IsaUnavailable:
            return False
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return activation in KINDS

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    @staticmethod
    def activation_format() -> Any:
        return mk.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    # -- a layer's life -------------------------------------------------------------------------------------------------------------------
    @property
    def kind(self) -> Kind:
        return KINDS[self.moe_config.activation]

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Packs what was loaded, the first time and every time after."""
        weights.pack(layer, self.kind.gate_layout)

    def moe_problem_size(self, a1: Any, w1: Any, w2: Any, topk_ids: Any) -> tuple[int, int, int, int, int]:
        """E, M, N, K, topk; packed weights do not show N in their shape."""
        I = self.moe_config.intermediate_size_per_partition
        return (
            w1.size(0),
            a1.size(0),
            I if self.kind.gate_layout == "none" else 2 * I,
            a1.size(1),
            topk_ids.size(1),
        )

    def workspace_shapes(
        self, M: int, N: int, K: int, topk: int, global_num_experts: int, local_num_experts: int,
        expert_tokens_meta: Any, activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """None left to do: `apply` weights and sums."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any,
        global_num_experts: int, expert_map: Any, a1q_scale: Any, a2_scale: Any, workspace13: Any, workspace2: Any,
        expert_tokens_meta: Any, apply_router_weight_on_input: bool,
    ) -> None:  # fmt: skip
        """Writes the weighted sum to `output [M, K]`.

        Args:
            hidden_states: `[M, K]` bf16; it carries the weights already under `apply_router_weight_on_input`.
            w1, w2: the packed parameters of the layer, `[E, elements]`.
            topk_weights, topk_ids: `[M, topk]`, any strides; ids int32 or int64, global, -1 = no expert.
            expert_map: `[global_num_experts]`, global to local id, -1 = on another rank; None without expert parallelism.
        Raises: ExpertIdError; ShapeError for weights that were loaded but not processed.
        """
        experts_into(
            output, hidden_states, w1, w2, self.w1_bias, self.w2_bias, self.moe_config.hidden_dim,
            self.moe_config.intermediate_size_per_partition, self.kind.gate_layout,
            None if apply_router_weight_on_input else topk_weights, topk_ids, expert_map, self.kind.activation,
        )  # fmt: skip
