"""Compares an answer with float64 before its time may count."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_cpu.activations import activate
from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.models import ModelShape

# Tokens computed in float64: enough to meet most experts, few enough that the largest published expert takes seconds.
SAMPLED_TOKENS = 8
# Rows of a weight turned into float64 at once, so that the check needs little memory beside the weights.
_ROWS = 2048
# Half an ulp of bf16, relative.
UNIT_ROUNDOFF = 2.0**-8
# Places where an implementation in bf16 may round: gate and up, activation, each expert's output, the weight, the product with it, the sum.
_ROUNDINGS = 6
TOLERANCE = _ROUNDINGS * UNIT_ROUNDOFF


def sample_tokens(M: int, rng: torch.Generator) -> Tensor:
    """Up to `SAMPLED_TOKENS` row numbers, the first and the last among them."""
    if M <= SAMPLED_TOKENS:
        return torch.arange(M)
    inner = torch.randperm(M - 2, generator=rng)[: SAMPLED_TOKENS - 2] + 1
    return torch.cat((torch.tensor([0, M - 1]), inner))


def _product(x: Tensor, weight: Tensor, *, magnitudes: bool = False) -> Tensor:
    """x @ weight.T in float64, or |x| @ |weight|.T."""
    parts = (weight[i : i + _ROWS].double() for i in range(0, weight.shape[0], _ROWS))
    if magnitudes:
        return torch.cat([x.abs() @ part.abs_().T for part in parts], dim=-1)
    return torch.cat([x @ part.T for part in parts], dim=-1)


def expected(layer: DenseLayer, inputs: Inputs, shape: ModelShape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of the layer's output in float64, `[rows, K]`, and their scale: sum of weight * sum |w2| * |h|, what rounding errors are relative to."""
    x, weights, ids = inputs.x[rows].double(), inputs.topk_weights[rows].double(), inputs.topk_ids[rows]
    out, scale = torch.zeros_like(x), torch.zeros_like(x)
    for e in ids.unique().tolist():
        if e < 0:
            continue
        row, slot = (ids == e).nonzero(as_tuple=True)
        h = _product(x[row], layer.w1[e])
        if layer.w1_bias is not None:
            h = h + layer.w1_bias[e].double()
        a = activate(h, shape.activation)
        y, magnitude = _product(a, layer.w2[e]), _product(a, layer.w2[e], magnitudes=True)
        if layer.w2_bias is not None:
            y, magnitude = y + layer.w2_bias[e].double(), magnitude + layer.w2_bias[e].double().abs()
        out.index_add_(0, row, y * weights[row, slot, None])
        scale.index_add_(0, row, magnitude * weights[row, slot, None].abs())
    return out, scale


def verdict(got: Tensor, rows: Tensor, want: Tensor, scale: Tensor) -> tuple[float, str | None]:
    """Relative error |got - want| / |want| of the sampled rows, and a sentence saying what is wrong, or None.

    Numerics: a right answer rounds at most at the `_ROUNDINGS` places, each by a factor of at most 1 + u, u = 2^-8. So each row's error is below
    6u in the norm, and each element's below 6u of its scale. All of `got` must be finite.
    """
    if got.shape[1] != want.shape[1] or got.dtype != torch.bfloat16:
        return float("nan"), f"expected [M, {want.shape[1]}] bf16, got {list(got.shape)} {got.dtype}"
    if not bool(torch.isfinite(got).all()):
        row = int((~torch.isfinite(got)).any(dim=1).nonzero()[0])
        return float("nan"), f"token {row} is not finite"
    error = (got[rows].double() - want).abs()
    relative = error.norm(dim=1) / want.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    whole = float(error.norm() / want.norm().clamp_min(torch.finfo(torch.float64).tiny))
    if float(relative.max()) > TOLERANCE:
        worst = int(relative.argmax())
        return (
            whole,
            f"token {int(rows[worst])} is off by {float(relative[worst]):.3g} of its norm; at most {TOLERANCE:.3g} is rounding",
        )
    if bool((error > TOLERANCE * scale).any()):
        row, column = (error > TOLERANCE * scale).nonzero()[0].tolist()
        return (
            whole,
            f"element [{int(rows[row])}, {column}] is off by {float(error[row, column]):.3g}, more than rounding can be",
        )
    return whole, None
