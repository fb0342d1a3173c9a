"""torch alone: tokens sorted by expert, two grouped products, the same as the default experts of Hugging Face transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_cpu.activations import activate
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape


class GroupedMM(Contender):
    """``torch._grouped_mm`` on dense weights. Source: transformers' ``grouped_mm`` experts, whose steps this follows."""

    name = "grouped_mm"
    keeps_dense = True

    def why_not(self, shape: ModelShape) -> str | None:
        if not hasattr(torch, "_grouped_mm"):
            return f"torch {torch.__version__} has no grouped product"
        if shape.K % 8 or shape.I % 8:
            return f"torch's grouped product needs rows of a multiple of 16 bytes: K and I divisible by 8, got {shape.K} and {shape.I}"
        return None

    def run(self, prepared: DenseLayer, inputs: Inputs, shape: ModelShape) -> Tensor:
        w1, w2, w1_bias, w2_bias = prepared
        x, topk_weights, topk_ids = inputs
        flat = topk_ids.flatten().long()
        order = flat.argsort(stable=True)
        # On a GPU bincount waits for its own maximum.
        counts = (
            torch.histc(flat.int(), shape.E, 0, shape.E - 1)
            if flat.is_cuda
            else torch.bincount(flat, minlength=shape.E)
        )
        ends = counts.cumsum(0).int()
        rows = order // shape.topk
        h = torch._grouped_mm(x[rows], w1.transpose(1, 2), ends)
        if w1_bias is not None:
            h = h + w1_bias[flat[order]].to(h.dtype)
        y = torch._grouped_mm(activate(h, shape.activation), w2.transpose(1, 2), ends)
        if w2_bias is not None:
            y = y + w2_bias[flat[order]].to(y.dtype)
        weighted = y.float() * topk_weights.flatten()[order, None]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return out.index_add_(0, rows, weighted).to(x.dtype)
