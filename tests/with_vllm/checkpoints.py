"""Tiny random models of three families, as checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

VOCABULARY = 256
LAYERS = 2
_COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# Every token goes to every expert, with weights of its own: where a few of many are chosen, a difference in the last bit may choose
# another one, and then nothing is comparable.
CONFIGS = {
    "qwen3": lambda: Qwen3MoeConfig(
        **_COMMON, head_dim=32, num_experts=8, num_experts_per_tok=8, moe_intermediate_size=96, intermediate_size=96,
        norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "mixtral": lambda: MixtralConfig(
        **_COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=4, intermediate_size=160, sliding_window=None
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON, head_dim=64, num_local_experts=4, num_experts_per_tok=4, intermediate_size=96, sliding_window=32
    ),
}  # fmt: skip


def save(family: str, folder: Path, other_experts: bool = False) -> Path:
    """Writes a random model whose tokens are the 256 bytes: the same one every time, or one that differs from it in the weights of the experts alone.

    Weights are scaled so that logits are a few units apart, and biases are not zero.
    """
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.bfloat16)
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            if "norm" in name:
                continue
            torch.manual_seed(seed + (1000 if other_experts and ".experts." in name else 0))
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 1
            scale = 0.5 if "bias" in name or "sinks" in name else 1.0 if "embed" in name else fan_in**-0.5
            parameter.normal_().mul_(scale * (3.0 if "lm_head" in name else 1.0))
    path = folder / (family + ("-other-experts" if other_experts else ""))
    model.save_pretrained(path)
    PreTrainedTokenizerFast(tokenizer_object=_bytes()).save_pretrained(path)
    return path


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
