"""What the model is: sizes, vocabulary, tokens of a text, and how its routing is looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

VOCABULARY = 1024
END = "<|endoftext|>"  # between documents, and at the start of a text

CONTEXT = 1024


def config() -> Qwen3MoeConfig:
    """Four layers of 16 experts with 4 to a token: 4.1 million parameters, of which 1.5 million work on a token."""
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        intermediate_size=384,  # of dense layers, of which there are none
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        router_aux_loss_coef=0.002,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level byte-pair encoding: every text has tokens, and common words have one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, model_max_length=CONTEXT
    )


def encode(tokenizer: Any, text: str) -> torch.Tensor:
    """Tokens of a text with END before it, `[1, tokens]`."""
    return torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]])


def nll(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens but the first of -log p(token), in nats, from logits `[batch, length, vocabulary]`."""
    scores = logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())


@contextmanager
def expert_counts(model: Any) -> Iterator[torch.Tensor]:
    """`[layers, experts]` int64: how many pairs of a token and an expert each layer's router made inside the block."""
    counts = torch.zeros(
        model.config.num_hidden_layers, model.config.num_experts, dtype=torch.long, device=model.device
    )

    def count(row: torch.Tensor) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            row.add_(torch.bincount(output[2].flatten(), minlength=len(row)))

        return hook

    handles = [
        layer.mlp.gate.register_forward_hook(count(row))
        for layer, row in zip(model.model.layers, counts, strict=True)
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
