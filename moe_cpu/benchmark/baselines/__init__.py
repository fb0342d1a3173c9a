"""Competitors, one adapter a file; each is found by its name here and imports what it needs on use."""

from __future__ import annotations

from moe_cpu.benchmark.baselines.grouped_mm import GroupedMM
from moe_cpu.benchmark.baselines.kt import KTransformers
from moe_cpu.benchmark.baselines.sglang import SGLang
from moe_cpu.benchmark.baselines.torch_loop import TorchLoop
from moe_cpu.benchmark.baselines.vllm import VLLM
from moe_cpu.benchmark.contender import Contender

BASELINES: dict[str, type[Contender]] = {
    "grouped_mm": GroupedMM,
    "torch_loop": TorchLoop,
    "vllm": VLLM,
    "sglang": SGLang,
    "kt": KTransformers,
}

__all__ = ["BASELINES"]
