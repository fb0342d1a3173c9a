"""vLLM's own MoE layer with the weights of a test case, and ways to load and call it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from strategies import Case, make_case
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

# Ours -> vLLM's.
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "swigluoai": "swigluoai",
    "relu2": "relu2_no_mul",
}
_names = (f"experts_{i}" for i in itertools.count())


def vllm_case(**options: Any) -> Case:
    """A case whose biases have the dtype of vLLM's parameters."""
    case = make_case(**options)
    if case.w1_bias is None or case.w2_bias is None:
        return case
    return case.with_(w1_bias=case.w1_bias.bfloat16(), w2_bias=case.w2_bias.bfloat16())


def new_layer(case: Case, **options: Any) -> Any:
    """`RoutedExperts` of the case's sizes, as a model makes it; its weights are not loaded."""
    E, N, K = case.w1.shape
    gated = case.activation != "relu2"
    runner = FusedMoEFactory(
        num_experts=E,
        top_k=case.topk_ids.shape[1],
        hidden_size=K,
        intermediate_size=N // 2 if gated else N,
        params_dtype=torch.bfloat16,
        prefix=next(_names),
        apply_router_weight_on_input=case.weight_on_input,
        has_bias=case.w1_bias is not None,
        ckpt_names=("gate_proj", "down_proj", "up_proj" if gated else None),
        **{"activation": ACTIVATIONS[case.activation], **options},
    )
    layer = runner.routed_experts
    record_metadata_for_reloading(layer)
    return layer


def load(layer: Any, case: Case, experts: Any = None) -> None:
    """Calls the parameters' loaders, one expert's matrix at a time, as `model.load_weights` does."""
    parameters = dict(layer.named_parameters())
    for e in range(case.E) if experts is None else experts:
        for name, shard, matrix in _shards(case, e):
            loader = parameters[name].weight_loader
            loader(parameters[name], matrix, name, shard_id=shard, expert_id=e)


def _shards(case: Case, e: int) -> list[tuple[str, str, Tensor]]:
    """Parameter, vLLM's word for the part of it, and the part, for one expert."""
    parts = []
    for kind, first, second in (("weight", case.w1, case.w2), ("bias", case.w1_bias, case.w2_bias)):
        if first is None or second is None:
            continue
        rows = first[e].chunk(1 if case.activation == "relu2" else 2)
        parts += [(f"w13_{kind}", shard, part) for shard, part in zip(("w1", "w3"), rows, strict=False)]
        parts.append((f"w2_{kind}", "w2", second[e]))
    return parts


class Model(nn.Module):
    """A model of one layer, which is all that vLLM's reloading looks at."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer


def loaded_layer(case: Case, **options: Any) -> Any:
    """A layer that is ready for its first token."""
    layer = new_layer(case, **options)
    load(layer, case)
    process(layer)
    return layer


def process(layer: Any) -> None:
    """What vLLM does after loading."""
    layer.quant_method.process_weights_after_loading(layer)


def call(layer: Any, case: Case, **changes: Any) -> Tensor:
    """The layer's output, through vLLM's modular kernel."""
    given = {
        "x": case.x,
        "topk_weights": case.topk_weights,
        "topk_ids": case.topk_ids,
        "expert_map": case.expert_map,
        **changes,
    }
    experts = case.E if given["expert_map"] is None else given["expert_map"].shape[0]
    return layer.quant_method.moe_kernel.apply(
        hidden_states=given["x"],
        w1=layer.w13_weight,
        w2=layer.w2_weight,
        topk_ids=given["topk_ids"],
        topk_weights=given["topk_weights"],
        activation=MoEActivation(layer.activation),
        global_num_experts=experts,
        expert_map=given["expert_map"],
        apply_router_weight_on_input=case.weight_on_input,
    )
