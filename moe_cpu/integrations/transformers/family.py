"""A family of models that transformers implements, as a tiny random model of it."""

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
