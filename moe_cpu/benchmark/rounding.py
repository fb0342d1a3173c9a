"""One expert in float64, written from the formulas, and how far an implementation in bf16 may be from it.

The chain of roundings is the longest that a right implementation has: products of bf16 summed in float32, and a result in bf16 after each of the first
product, the steps of the activation, and the second product. Rounding to precision u returns the exact value times 1 + d, |d| <= u; a sum of n products in any
order errs by at most n u / (1 - n u) * sum |a_i b_i| (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). Errors travel on through the
activation by its slope and through a product by absolute values.

Every error is kept twice: as a bound that adds up, which holds always, and as a variance (a rounding is at most uniform, u^2 / 3; n random ones add
n of them), which says how large errors are on the whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Half the spacing of numbers above 1: bf16 has 8 significand bits, float32 24.
BF16, F32 = 2.0**-8, 2.0**-24
# Below this bf16 and float32 may be flushed to zero.
TINY = 2.0**-126
# Additions of a sum beside its k products: chains joined, the bias.
_EXTRA_TERMS = 4
# Rows of a weight turned into float64 at once, so that the check needs little memory beside the weights.
_ROWS = 2048
# Clamped swish of gpt-oss: slope inside its sigmoid, bound of its clamps.
_ALPHA, _LIMIT = 1.702, 7.0
# Largest slope of x sigmoid(a x) for any a, and of both gelus, rounded up.
_SLOPE = {"silu": 1.1, "swigluoai": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}
# Roundings to bf16 on the way to gate's activation times up, each relative to that product: sigmoid, gate times it, up + 1.
_STEPS = 3
# One more moves the sigmoid's argument z by u |z|, and gate times sigmoid by |gate| |z sigmoid'(z)| u, where |z sigmoid'(z)| < 1/4.
_ARGUMENT = 0.25


class Uncertain(NamedTuple):
    """Exact values, the bound of their errors and the variance of their errors, float64 of one shape."""

    value: Tensor
    bound: Tensor
    variance: Tensor


def exact(value: Tensor) -> Uncertain:
    """Values without an error."""
    value = value.double()
    return Uncertain(value, torch.zeros_like(value), torch.zeros_like(value))


def rounded(of: Uncertain, times: int = 1, unit: float = BF16) -> Uncertain:
    """After `times` more roundings to precision `unit`."""
    value, bound, variance = of
    growth = (1 + unit) ** times - 1
    return Uncertain(
        value,
        bound + growth * (value.abs() + bound) + TINY,
        variance + times * unit**2 / 3 * value.square(),
    )


def product(of: Uncertain, weight: Tensor, bias: Tensor | None) -> Uncertain:
    """of @ weight.T + bias, summed in float32; the bias may have been rounded to bf16."""
    value, bound, variance = of
    n = weight.shape[1] + _EXTRA_TERMS
    magnitude = value.abs() + bound
    bound = bound + n * F32 / (1 - n * F32) * magnitude + F32 * TINY
    variance = variance + n * F32**2 / 3 * value.square()
    parts = []
    for start in range(0, weight.shape[0], _ROWS):
        part = weight[start : start + _ROWS].double()
        parts.append((value @ part.T, bound @ part.abs_().T, variance @ part.square_().T))
    value, bound, variance = (torch.cat(columns, dim=-1) for columns in zip(*parts, strict=True))
    bound = bound + n * TINY
    if bias is not None:
        bias = bias.double()
        value, bound = value + bias, bound + (BF16 + n * F32) * bias.abs()
        variance = variance + BF16**2 / 3 * bias.square()
    return Uncertain(value, bound, variance)


def _swish(gate: Tensor, slope: float) -> Tensor:
    """gate * sigmoid(slope * gate)."""
    return gate / (1 + (-slope * gate).exp())


def _gate(gate: Tensor, activation: str) -> Tensor:
    if activation == "gelu":
        return 0.5 * gate * torch.special.erfc(-gate / math.sqrt(2))
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return _swish(gate, _ALPHA if activation == "swigluoai" else 1.0)


def activated(of: Uncertain, activation: str) -> Uncertain:
    """The activation `[..., N] -> [..., I]`, of halves (swigluoai: of alternate columns), before its result is rounded."""
    if activation == "relu2":
        value, bound, variance = of
        value = value.clamp(min=0)
        return Uncertain(
            value.square(),
            2 * value * bound + bound.square(),
            4 * value.square() * variance + 3 * variance.square(),
        )
    if activation == "swigluoai":
        gate, up = (Uncertain(*(t[..., first::2] for t in of)) for first in (0, 1))
        gate = gate._replace(value=gate.value.clamp(max=_LIMIT))
        up = up._replace(value=up.value.clamp(-_LIMIT, _LIMIT) + 1)
    else:
        gate, up = (Uncertain(*half) for half in zip(*(t.chunk(2, dim=-1) for t in of), strict=True))
    g, slope, big_up = _gate(gate.value, activation), _SLOPE[activation], up.value.abs() + up.bound
    argument = _ARGUMENT * BF16 * gate.value.abs()
    bound = (slope * gate.bound + argument) * big_up + g.abs() * up.bound
    variance = slope**2 * gate.variance * (up.value.square() + up.variance) + g.square() * up.variance
    if activation == "swigluoai":  # up + 1 rounds relative to its result, which the steps count
        variance = variance + argument.square() / 3 * up.value.square()
    return rounded(Uncertain(g * up.value, bound, variance), _STEPS)


def expert(
    x: Tensor, w1: Tensor, w2: Tensor, w1_bias: Tensor | None, w2_bias: Tensor | None, activation: str
) -> Uncertain:
    """One expert's result for rows `x [rows, K]`, w1 `[N, K]` and w2 `[K, I]`."""
    g = rounded(product(exact(x), w1, w1_bias))
    h = rounded(activated(g, activation))
    return rounded(product(h, w2, w2_bias))
