"""Compares an answer with float64 before its time may count."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_cpu.benchmark import rounding
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.benchmark.rounding import BF16, Uncertain
from moe_cpu.models import ModelShape

# Tokens computed in float64: enough to meet most experts, few enough that the largest published expert takes seconds.
SAMPLED_TOKENS = 8
# A token's errors may be this many times their standard deviation in the 2-norm. The norm is taken over K of them, so it stays near one deviation;
# a fault that the element-wise bound is too wide for does not.
DEVIATIONS = 3.0


def sample_tokens(M: int, rng: torch.Generator) -> Tensor:
    """Up to `SAMPLED_TOKENS` row numbers, the first and the last among them."""
    if M <= SAMPLED_TOKENS:
        return torch.arange(M)
    inner = torch.randperm(M - 2, generator=rng)[: SAMPLED_TOKENS - 2] + 1
    return torch.cat((torch.tensor([0, M - 1]), inner))


def expected(layer: DenseLayer, inputs: Inputs, shape: ModelShape, rows: Tensor) -> Uncertain:
    """The rows of the layer's output in float64, `[rows, K]`, with the bound and the variance of what rounding may add.

    Numerics: `rounding.expert` for each pair; its router weight and their product may be rounded to bf16, the slots are summed in float32, and the sum is
    rounded to bf16.
    """
    x, weights, ids = inputs.x[rows], inputs.topk_weights[rows].double(), inputs.topk_ids[rows]
    out = rounding.exact(torch.zeros_like(x))
    for e in ids.unique().tolist():
        if e < 0:
            continue
        row, slot = (ids == e).nonzero(as_tuple=True)
        b1, b2 = (None if bias is None else bias[e] for bias in (layer.w1_bias, layer.w2_bias))
        y = rounding.expert(x[row], layer.w1[e], layer.w2[e], b1, b2, shape.activation)
        w = weights[row, slot, None]
        weighted = Uncertain(w * y.value, w.abs() * y.bound, w.square() * y.variance)
        weighted = rounding.rounded(rounding.rounded(weighted, 2), shape.topk, rounding.F32)
        for total, part in zip(out, weighted, strict=True):
            total.index_add_(0, row, part)
    return rounding.rounded(out)


def verdict(got: Tensor, rows: Tensor, want: Uncertain) -> tuple[float, str | None]:
    """Relative error |got - want| / |want| of the sampled rows, and a sentence saying what is wrong, or None.

    Wrong is: another shape or dtype than bf16 `[M, K]`; anything not finite; an element outside its bound; a token whose error exceeds `DEVIATIONS`
    times the standard deviation that roundings give it, both in the 2-norm.
    """
    value, bound, variance = want
    if got.shape[1] != value.shape[1] or got.dtype != torch.bfloat16:
        return float("nan"), f"expected [M, {value.shape[1]}] bf16, got {list(got.shape)} {got.dtype}"
    if not bool(torch.isfinite(got).all()):
        row = int((~torch.isfinite(got)).any(dim=1).nonzero()[0])
        return float("nan"), f"token {row} is not finite"
    error = (got[rows].double() - value).abs()
    whole = float(error.norm() / value.norm().clamp_min(BF16 * rounding.TINY))
    outside = error - bound
    if bool((outside > 0).any()):
        row, column = divmod(int(outside.argmax()), value.shape[1])
        return (
            whole,
            f"element [{int(rows[row])}, {column}] is off by {float(error[row, column]):.3g}; rounding explains at most {float(bound[row, column]):.3g}",
        )
    share = error.norm(dim=1) / (variance.sum(dim=1).sqrt() + BF16 * rounding.TINY)
    if float(share.max()) > DEVIATIONS:
        worst = int(share.argmax())
        return (
            whole,
            f"token {int(rows[worst])} is off by {float(share[worst]):.3g} standard deviations of what rounding adds; at most {DEVIATIONS:g} are chance",
        )
    return whole, None
