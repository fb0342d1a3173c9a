"""vLLM's fused experts for CPUs, ``cpu_fused_moe``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_cpu.benchmark.baselines import vllm_library
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


class VLLM(Contender):
    """``prepack_moe_weight`` once, then ``cpu_fused_moe``, with AMX where the library and the CPU have it."""

    name = "vllm"
    copies = 1

    def why_not(self, shape: ModelShape) -> str | None:
        if shape.activation not in _ACTIVATIONS:
            return f"its activations are {', '.join(_ACTIVATIONS)}; this shape has {shape.activation}"
        if shape.K % 32 or shape.I % 32:
            return f"K and I must be multiples of 32, got {shape.K} and {shape.I}"
        return vllm_library.why_not("cpu_fused_moe")

    def prepare(self, layer: DenseLayer, shape: ModelShape) -> Any:
        isa = "amx" if vllm_library.has_amx() else "vec"
        packed = [torch.empty_like(w) for w in (layer.w1, layer.w2)]
        for dense, target in zip((layer.w1, layer.w2), packed, strict=True):
            vllm_library.operators().prepack_moe_weight(dense, target, isa)
        biases = [None if b is None else b.to(torch.bfloat16) for b in (layer.w1_bias, layer.w2_bias)]
        return *packed, *biases, isa

    def run(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> Tensor:
        w1, w2, w1_bias, w2_bias, isa = prepared
        out = torch.empty_like(inputs.x)
        vllm_library.operators().cpu_fused_moe(
            out,
            inputs.x,
            w1,
            w2,
            w1_bias,
            w2_bias,
            inputs.topk_weights,
            inputs.topk_ids,
            False,
            shape.activation,
            isa,
        )
        return out
