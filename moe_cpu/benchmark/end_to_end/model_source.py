"""A transformers model from what `ModelSource` says: its configuration at once, its weights when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from moe_cpu.benchmark.end_to_end import random_model
from moe_cpu.benchmark.end_to_end.settings import ModelSource
from moe_cpu.errors import ArgumentError
from moe_cpu.models import find

# Code that a checkpoint brings along is never run, and nothing is looked for elsewhere.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def config_of(source: ModelSource) -> Any:
    """The model's configuration.

    Raises:
        ArgumentError: no such shape, or the folder is not one that transformers can load.
    """
    if source.shape is not None:
        shape = find(source.shape)
        return random_model.config_of(
            shape if source.experts is None else shape.with_experts(source.experts), source.layers
        )
    assert source.folder is not None
    if not (Path(source.folder) / "config.json").is_file():
        raise ArgumentError(f"model-dir: expected a folder with a config.json, got {source.folder}")
    try:
        return AutoConfig.from_pretrained(source.folder, **_LOCAL)
    except (OSError, ValueError, KeyError) as error:
        raise ArgumentError(
            f"model-dir: transformers cannot read {source.folder}/config.json: {error}"
        ) from error


def load(source: ModelSource, config: Any, implementation: str) -> Any:
    """The model in bf16 and evaluation mode.

    Raises:
        ArgumentError: transformers cannot load the folder's weights.
    """
    if source.folder is None:
        return random_model.build(config, source.seed, implementation)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, dtype=torch.bfloat16, experts_implementation=implementation, **_LOCAL
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ArgumentError(f"model-dir: transformers cannot load {source.folder}: {error}") from error
    return model.eval()


def skeleton(config: Any) -> Any:
    """The model without memory behind its weights (on torch's meta device), for its sizes.

    Raises:
        ArgumentError: it has no language model's head, or no layers on transformers' experts interface.
    """
    from moe_cpu.integrations.transformers.detect import is_experts_module

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    except ValueError as error:
        raise ArgumentError(f"model: transformers makes no causal language model of it: {error}") from error
    if not any(is_experts_module(module) for module in model.modules()):
        raise ArgumentError(
            f"model: expected one with layers on transformers' experts interface, {type(model).__name__} has none"
        )
    return model
