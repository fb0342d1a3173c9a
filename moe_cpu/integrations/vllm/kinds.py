"""Which layers of vLLM the kernels cover, and what those layers compute in our words."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from moe_cpu.activations import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from moe_cpu.errors import dtype_name


class Kind(NamedTuple):
    """The kernels' activation, and the order in which `w13` has gate and up rows."""

    activation: str
    gate_layout: str


KINDS = {
    MoEActivation.SILU: Kind("silu", "concatenated"),
    MoEActivation.GELU: Kind("gelu", "concatenated"),
    MoEActivation.GELU_TANH: Kind("gelu_tanh", "concatenated"),
    MoEActivation.SWIGLUOAI: Kind("swigluoai", "interleaved"),
    MoEActivation.SWIGLUOAI_UNINTERLEAVE: Kind("swigluoai", "concatenated"),
    MoEActivation.RELU2_NO_MUL: Kind("relu2", "none"),
}
# Limit, slope and the number added to `up` of the one clamped gate that the kernels have.
_CLAMPED = (SWIGLUOAI_LIMIT, SWIGLUOAI_ALPHA, 1.0)


def why_not(moe_config: Any) -> str | None:
    """Why a layer with a known activation cannot run on the kernels, or None when it can.

    Args:
        moe_config: vLLM's FusedMoEConfig.
    """
    if moe_config.in_dtype != torch.bfloat16:
        return f"the model's dtype is {dtype_name(moe_config.in_dtype)}, the kernels take bf16; pass --dtype bfloat16"
    return _why_not_gate(moe_config)


def _why_not_gate(moe_config: Any) -> str | None:
    given = (moe_config.swiglu_limit, moe_config.swiglu_alpha, moe_config.swiglu_beta)
    if moe_config.activation == MoEActivation.SWIGLUOAI:
        # vLLM's own operator has the three built in; a model need not repeat them.
        meant = tuple(own if value is None else value for value, own in zip(given, _CLAMPED, strict=True))
    elif moe_config.activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        meant = given
    else:
        return (
            None
            if given[0] is None
            else f"its gate is clamped at {given[0]}, which the kernels do only for swigluoai"
        )
    if meant == _CLAMPED:
        return None
    return f"limit, slope and offset of its clamped gate are {meant}, the kernels have {_CLAMPED}"
