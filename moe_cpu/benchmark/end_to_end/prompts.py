"""Prompts of random tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_cpu.benchmark.end_to_end.settings import Settings


def prompt_of(model: Any, settings: Settings, batch: int) -> Tensor:
    """`[batch, prompt_tokens]` int64 of the model's vocabulary, the same ones for the same seed."""
    rng = torch.Generator().manual_seed(settings.seed)
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (batch, settings.prompt_tokens), generator=rng)
