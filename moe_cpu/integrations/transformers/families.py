"""Tiny configurations of model families: what the tests run and what the status table is made of.

Odd widths on purpose: hidden and intermediate sizes off the multiples of 32 that kernels like.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from moe_cpu.integrations.transformers import detect

VOCABULARY = 96
_SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One family: its module under transformers.models, its classes, what differs from the common sizes, and what should run it."""

    name: str
    package: str
    config: str
    model: str
    activation: str | None
    options: dict[str, Any] = field(default_factory=dict)
    notes: str = ""

    def build(self, dtype: torch.dtype = torch.float32, implementation: str = "eager", seed: int = 0) -> Any:
        """A random model in evaluation mode, the same weights for the same seed. Raises ImportError where transformers lacks it."""
        try:
            package = importlib.import_module(f"transformers.models.{self.package}")
            config_class, model_class = getattr(package, self.config), getattr(package, self.model)
        except (ImportError, AttributeError) as error:
            raise ImportError(f"this transformers has no {self.model}: {error}") from error
        torch.manual_seed(seed)
        config = config_class(**{**_SMALL, **self.options}, experts_implementation=implementation)
        model = model_class._from_config(config, dtype=torch.float32)
        if not any(detect.is_experts_module(module) for module in model.modules()):
            raise ImportError(
                f"this transformers has {self.model}, but its experts are not on the experts interface yet"
            )
        _spread(model, seed)
        if dtype != torch.float32:  # built anew, because buffers have dtypes of their own
            weights, model = dict(model.named_parameters()), model_class._from_config(config, dtype=dtype)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.copy_(weights[name])
        return model.eval()


def _spread(model: nn.Module, seed: int) -> None:
    """Weights large enough that experts and routing matter: the usual 0.02 would leave the experts' result in the noise."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "experts" in name and weight.dim() == 3:
                weight.normal_(0, 1 / weight.shape[-1] ** 0.5, generator=generator)
            elif "experts" in name and name.endswith("_bias"):
                weight.normal_(0, 0.1, generator=generator)
            elif (".gate." in name or "router" in name) and weight.dim() == 2:
                weight.normal_(0, 0.5, generator=generator)


_DEEPSEEK: dict[str, Any] = dict(
    moe_intermediate_size=40, num_experts_per_tok=2, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, num_hidden_layers=3,
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, head_dim=8,
)  # fmt: skip
_HYBRID: dict[str, Any] = dict(mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4)

FAMILIES: tuple[Family, ...] = (
    Family(
        "Mixtral",
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        "silu",
        dict(num_local_experts=6, num_experts_per_tok=2),
    ),
    Family(
        "Qwen2-MoE",
        "qwen2_moe",
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        "silu",
        dict(
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            shared_expert_intermediate_size=56,
            decoder_sparse_step=1,
        ),
    ),
    Family(
        "Qwen3-MoE",
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        "silu",
        dict(
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            head_dim=16,
            decoder_sparse_step=1,
            norm_topk_prob=True,
        ),
    ),
    Family(
        "Qwen3-Next",
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        "silu",
        dict(
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=40,
            shared_expert_intermediate_size=40,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention"],
            decoder_sparse_step=1,
        ),
    ),
    Family(
        "OLMoE",
        "olmoe",
        "OlmoeConfig",
        "OlmoeForCausalLM",
        "silu",
        dict(num_experts=8, num_experts_per_tok=4),
    ),
    Family(
        "DeepSeek-V2",
        "deepseek_v2",
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        "silu",
        {**_DEEPSEEK, "n_routed_experts": 8, "topk_method": "group_limited_greedy"},
    ),
    Family(
        "DeepSeek-V3",
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        "silu",
        {**_DEEPSEEK, "n_routed_experts": 8},
    ),
    Family(
        "GLM-4-MoE",
        "glm4_moe",
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        "silu",
        dict(
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            moe_intermediate_size=40,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            num_hidden_layers=3,
            head_dim=16,
        ),
    ),
    Family(
        "gpt-oss",
        "gpt_oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        "swigluoai",
        dict(
            num_local_experts=6,
            num_experts_per_tok=2,
            head_dim=16,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Family(
        "GraniteMoE",
        "granitemoe",
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        "silu",
        dict(num_local_experts=6, num_experts_per_tok=2),
    ),
    Family(
        "PhiMoE",
        "phimoe",
        "PhimoeConfig",
        "PhimoeForCausalLM",
        "silu",
        dict(num_local_experts=6, num_experts_per_tok=2),
    ),
    Family(
        "Jamba",
        "jamba",
        "JambaConfig",
        "JambaForCausalLM",
        "silu",
        {
            **_HYBRID,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    Family(
        "MiniMax",
        "minimax",
        "MiniMaxConfig",
        "MiniMaxForCausalLM",
        "silu",
        dict(
            num_local_experts=6,
            num_experts_per_tok=2,
            head_dim=16,
            block_size=16,
            layer_types=["linear_attention", "full_attention"],
        ),
    ),
    Family(
        "Aria (text)",
        "aria",
        "AriaTextConfig",
        "AriaTextForCausalLM",
        "silu",
        dict(moe_num_experts=6, moe_topk=2, moe_num_shared_experts=1),
    ),
    Family(
        "NemotronH",
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        "relu2",
        dict(
            n_routed_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            moe_shared_expert_intermediate_size=40,
            moe_latent_size=24,
            n_group=1,
            topk_group=1,
            layers_block_type=["moe", "attention", "moe"],
            num_hidden_layers=3,
            head_dim=16,
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=2,
        ),
        "experts of width 24 in a model of width 48",
    ),
    Family(
        "Gemma-4 (text)",
        "gemma4",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        "gelu_tanh",
        dict(
            enable_moe_block=True,
            num_experts=6,
            top_k_experts=2,
            moe_intermediate_size=40,
            head_dim=16,
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCABULARY,
            num_kv_shared_layers=0,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    Family(
        "OpenAI privacy filter",
        "openai_privacy_filter",
        "OpenAIPrivacyFilterConfig",
        "OpenAIPrivacyFilterForTokenClassification",
        None,
        dict(num_local_experts=6, num_experts_per_tok=2, head_dim=16, sliding_window=8),
        "gate of its own",
    ),
    Family(
        "DeepSeek-V4", "deepseek_v4", "DeepseekV4Config", "DeepseekV4ForCausalLM", None, {}, "gate of its own"
    ),
)
