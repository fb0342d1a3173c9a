"""torch alone: a loop over the experts that got a token, as models wrote it before grouped products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_cpu.activations import activate
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape


class TorchLoop(Contender):
    """Two ``torch.nn.functional.linear`` an expert. Source: transformers' ``eager`` experts, whose steps this follows."""

    name = "torch_loop"
    keeps_dense = True

    def why_not(self, shape: ModelShape) -> str | None:
        return None

    def run(self, prepared: DenseLayer, inputs: Inputs, shape: ModelShape) -> Tensor:
        w1, w2, w1_bias, w2_bias = prepared
        x, topk_weights, topk_ids = inputs
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for e in topk_ids.unique().tolist():
            rows, slots = (topk_ids == e).nonzero(as_tuple=True)
            h = F.linear(x[rows], w1[e], None if w1_bias is None else w1_bias[e].to(x.dtype))
            y = F.linear(
                activate(h, shape.activation), w2[e], None if w2_bias is None else w2_bias[e].to(x.dtype)
            )
            out.index_add_(0, rows, y.float() * topk_weights[rows, slots, None])
        return out.to(x.dtype)
