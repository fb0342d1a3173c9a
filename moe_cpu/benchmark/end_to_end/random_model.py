"""Models of published sizes with random weights, made in seconds and without a download."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_cpu.errors import ArgumentError
from moe_cpu.models import ModelShape

# Numbers drawn once for a whole model; weights are copies of this row, each starting where the one before it stopped. The length is a prime, so
# no two rows of a matrix and no two experts are alike.
_DRAWN = 16_777_213


class _Family(NamedTuple):
    """Configuration class of a family, under which name it keeps the experts' number and width, and what its publisher set of the rest."""

    config: str
    experts: str
    width: str
    rest: dict[str, Any]


def _qwen3(heads: int, dense_width: int) -> _Family:
    rest = dict(
        vocab_size=151936, num_attention_heads=heads, num_key_value_heads=4, head_dim=128, intermediate_size=dense_width, norm_topk_prob=True,
        max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return _Family("qwen3_moe.Qwen3MoeConfig", "num_experts", "moe_intermediate_size", rest)


_GPT_OSS = _Family("gpt_oss.GptOssConfig", "num_local_experts", "intermediate_size", dict(vocab_size=201088))
# Values other than the layer's own come from the config.json of each shape's `source`; for gpt-oss they are the class's defaults.
FAMILIES: dict[str, _Family] = {
    "qwen3-30b-a3b": _qwen3(32, 6144),
    "qwen3-235b-a22b": _qwen3(64, 12288),
    "mixtral-8x7b": _Family(
        "mixtral.MixtralConfig",
        "num_local_experts",
        "intermediate_size",
        dict(vocab_size=32000, num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768),
    ),
    "olmoe-1b-7b": _Family(
        "olmoe.OlmoeConfig",
        "num_experts",
        "intermediate_size",
        dict(vocab_size=50304, num_attention_heads=16, num_key_value_heads=16, norm_topk_prob=False),
    ),
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS,
}


def config_of(shape: ModelShape, layers: int | None = None) -> Any:
    """The configuration of a published model, with `layers` decoder layers if given and as many experts as `shape` has.

    Raises:
        ArgumentError: no family here has that shape, or transformers lacks the family.
    """
    name = shape.name.partition("/")[0]  # "olmoe-1b-7b/8-experts" is olmoe-1b-7b with fewer experts
    family = FAMILIES.get(name)
    if family is None:
        raise ArgumentError(f"random-config: expected one of {', '.join(FAMILIES)}; got {name!r}")
    module, _, config_class = family.config.partition(".")
    try:
        kind = getattr(importlib.import_module(f"transformers.models.{module}"), config_class)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"random-config: this transformers has no {config_class}: {error}") from error
    own = {family.experts: shape.E, family.width: shape.I}
    return kind(
        hidden_size=shape.K,
        num_experts_per_tok=shape.topk,
        num_hidden_layers=layers or shape.layers,
        **{**family.rest, **own},
    )


def build(config: Any, seed: int, implementation: str) -> Any:
    """A bf16 model in evaluation mode with normal weights, scaled so that each layer adds about as much as it is given.

    Memory: the model and 64 MiB.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # The usual initialisation draws every weight on one thread, minutes for a large model.
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation=implementation
        )
    model.tie_weights()
    row = _Row(seed)
    with torch.no_grad():
        for module, weight in _to_fill(model):
            row.fill(weight, _scale(module, weight))
    return model.eval()


def _to_fill(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Every parameter once, but those of norms, which are made as ones."""
    seen: set[int] = set()
    for module in model.modules():
        if "Norm" in type(module).__name__:
            continue
        for weight in module.parameters(recurse=False):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield module, weight


def _scale(module: nn.Module, weight: Tensor) -> float:
    if isinstance(module, nn.Embedding):
        return 1.0
    if weight.dim() < 2 or (weight.dim() == 2 and getattr(module, "has_bias", False)):
        return 0.1  # biases, of experts as [E, N] too
    transposed = weight.dim() == 3 and getattr(module, "is_transposed", False)
    return float(weight.shape[-2 if transposed else -1] ** -0.5)


class _Row:
    """An endless row of normal numbers that repeats itself after `_DRAWN` of them."""

    def __init__(self, seed: int) -> None:
        self.numbers = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(seed))
        self.place = 0

    def fill(self, weight: Tensor, scale: float) -> None:
        flat, done = weight.view(-1), 0
        while done < flat.numel():
            size = min(flat.numel() - done, _DRAWN - self.place)
            torch.mul(self.numbers[self.place : self.place + size], scale, out=flat[done : done + size])
            done += size
            self.place = (self.place + size) % _DRAWN
