"""The MoE blocks of transformers whose routing is one of ours, as configurations of `MoELayer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from moe_cpu.errors import ArgumentError
from moe_cpu.integrations.transformers.detect import activation_name, computation_of, is_experts_module
from moe_cpu.layer_config import MoELayerConfig


def _softmax(router: Any) -> dict[str, Any]:
    """Softmax over the chosen experts, or over all and renormalised, which is the same."""
    return {"router": "softmax", "renormalize": getattr(router, "norm_topk_prob", True)}


def _deepseek_v2(router: Any) -> dict[str, Any]:
    groups = (router.num_group, router.topk_group) if router.topk_method == "group_limited_greedy" else (1, 1)
    if router.topk_method not in ("greedy", "group_limited_greedy"):
        raise ArgumentError(
            f"block: expected topk_method greedy or group_limited_greedy, got {router.topk_method!r}"
        )
    return {
        "router": "grouped", "scoring_func": "softmax", "renormalize": False, "num_expert_group": groups[0], "topk_group": groups[1],
        "routed_scaling_factor": router.routed_scaling_factor, "router_float32": True,
    }  # fmt: skip


def _deepseek_v3(router: Any) -> dict[str, Any]:
    return {
        "router": "grouped", "scoring_func": "sigmoid", "renormalize": router.norm_topk_prob, "num_expert_group": router.num_group,
        "topk_group": router.topk_group, "routed_scaling_factor": router.routed_scaling_factor, "router_float32": True, "correction_bias": True,
    }  # fmt: skip


def _sigmoid_top1(router: Any) -> dict[str, Any]:
    return {"router": "sigmoid_top1", "renormalize": False}


# Class of the block -> its routing. A class that is not here may route in any way.
_ROUTING: dict[str, Callable[[Any], dict[str, Any]]] = {
    "MixtralSparseMoeBlock": _softmax,
    "MiniMaxSparseMoeBlock": _softmax,
    "Qwen2MoeSparseMoeBlock": _softmax,
    "Qwen3MoeSparseMoeBlock": _softmax,
    "Qwen3NextSparseMoeBlock": _softmax,
    "OlmoeSparseMoeBlock": _softmax,
    "GptOssMLP": _softmax,
    "GraniteMoeMoE": _softmax,
    "AriaTextMoELayer": _softmax,
    "DeepseekV2Moe": _deepseek_v2,
    "DeepseekV3MoE": _deepseek_v3,
    "Glm4MoeMoE": _deepseek_v3,
    "NemotronHMoE": _deepseek_v3,
    "Llama4TextMoe": _sigmoid_top1,
}


def config_of(block: Any) -> MoELayerConfig:
    """What `MoELayer` needs to be `block`. Raises ArgumentError with the reason when it cannot be."""
    kind = type(block)
    routing = _ROUTING.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None
    if routing is None:
        raise ArgumentError(f"block: expected one of {', '.join(_ROUTING)}, got {kind.__name__}")
    if getattr(block, "fc1_latent_proj", None) is not None and not isinstance(
        block.fc1_latent_proj, nn.Identity
    ):
        raise ArgumentError(f"block: {kind.__name__} projects to a latent space before its experts")
    router_name = "gate" if hasattr(block, "gate") else "router"
    router, experts = getattr(block, router_name), block.experts
    activation, gated, transposed, bias = _experts(experts)
    down = experts.down_proj.shape
    E, K, inner = (down[0], *((down[2], down[1]) if transposed else (down[1], down[2])))
    if down[0] == 0:
        raise ArgumentError("block: its dense weights were released; unpack(model) first")
    return MoELayerConfig(
        hidden_size=K,
        intermediate_size=inner,
        num_experts=E,
        topk=router.top_k,
        router_bias=getattr(router, "bias", None) is not None,
        activation=activation,
        bias=bias,
        transposed=transposed,
        router_name=router_name,
        **routing(router),
        **_shared(block, gated),
    )


def _experts(experts: Any) -> tuple[str, bool, bool, bool]:
    """Activation, whether there is a gate, whether matrices are transposed, whether there are biases."""
    if not is_experts_module(experts):  # Llama 4's, which is not on the interface
        name = activation_name(experts.act_fn)
        if name is None:
            raise ArgumentError(f"block: its activation {type(experts.act_fn).__name__} is not known")
        return name, True, True, False
    computes = computation_of(experts)
    if computes.activation is None:
        raise ArgumentError(f"block: {type(experts).__name__} cannot run on the kernels: {computes.reason}")
    return computes.activation, experts.has_gate, experts.is_transposed, experts.has_bias


def _shared(block: Any, gated: bool) -> dict[str, Any]:
    for name in ("shared_expert", "shared_experts"):
        mlp = getattr(block, name, None)
        if mlp is None:
            continue
        act = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
        activation = activation_name(act)
        if activation is None or (activation == "relu2") == gated:
            raise ArgumentError(f"block: the activation {type(act).__name__} of its {name} is not known")
        return {
            "shared_name": name, "shared_intermediate_size": mlp.up_proj.weight.shape[0], "shared_activation": activation,
            "shared_bias": mlp.up_proj.bias is not None, "shared_gate": hasattr(block, "shared_expert_gate"),
        }  # fmt: skip
    return {}
