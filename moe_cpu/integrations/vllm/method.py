"""The method through which vLLM's unquantised MoE layers reach our experts: its registered replacement of `UnquantizedFusedMoEMethod`."""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from moe_cpu import isa
from moe_cpu.integrations.vllm.experts import MoeCpuExperts
from moe_cpu.integrations.vllm.kinds import KINDS
from moe_cpu.integrations.vllm.log import logger
from moe_cpu.integrations.vllm.weights import unpacking_loader

_REPLACED = UnquantizedFusedMoEMethod.__name__


class MoeCpuFusedMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method, with our experts for the layers that they cover."""

    def __init__(self, moe: Any) -> None:
        reason = _why_not(moe)
        if reason is None:
            # Past the parent's, which would choose among vLLM's own experts, and fail where those cover less.
            FusedMoEMethodBase.__init__(self, moe)
            self.unquantized_backend = UnquantizedMoeBackend.CPU
            self.experts_cls = MoeCpuExperts
            self.supports_pre_processed_weights = True
            logger.info_once(
                "moe_cpu: bf16 %s experts run on its kernels (%s) instead of vLLM's",
                moe.activation.value,
                isa.active(),
            )
        else:
            super().__init__(moe)
            logger.info_once("moe_cpu: %s experts stay with vLLM's kernels: %s", moe.activation.value, reason)

    def create_weights(self, layer: torch.nn.Module, *args: Any, **attributes: Any) -> None:
        """vLLM's parameters, with a loader that may be called again after they were packed."""
        if self.experts_cls is MoeCpuExperts:
            attributes["weight_loader"] = unpacking_loader(
                attributes["weight_loader"], KINDS[self.moe.activation].gate_layout
            )
        super().create_weights(layer, *args, **attributes)

    def _setup_kernel(self, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
        """Packs after every load. vLLM's does after the first one only, and puts dense weights of later ones where the packed ones were."""
        if self.experts_cls is not MoeCpuExperts:
            super()._setup_kernel(layer, w13, w2)
            return
        if self.moe_kernel is None:
            self._init_moe_kernel(layer)
        self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def install() -> str | None:
    """Registers the method, unless it is; returns the reason when somebody else's is."""
    present = op_registry_oot.get(_REPLACED)
    if present is None:
        UnquantizedFusedMoEMethod.register_oot(MoeCpuFusedMoEMethod)
    elif present is not MoeCpuFusedMoEMethod:
        return f"{present.__module__}.{present.__qualname__} has replaced {_REPLACED} already"
    return None


def _why_not(moe: Any) -> str | None:
    """Why a layer stays with vLLM's experts, or None."""
    if moe.moe_backend != "auto":
        return f"the backend {moe.moe_backend!r} was asked for"
    batched = moe.moe_parallel_config.use_batched_activation_format
    form = mk.FusedMoEActivationFormat.BatchedExperts if batched else mk.FusedMoEActivationFormat.Standard
    _, reason = MoeCpuExperts.is_supported_config(MoeCpuExperts, moe, None, None, form)
    return reason
