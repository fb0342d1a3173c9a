"""Weights, tokens and routing of a case, from a seed."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_cpu.benchmark.routing import random_routing
from moe_cpu.models import ModelShape

# Drawing normal numbers is the slowest part of making weights, so a few experts are drawn and the others are these with their rows rotated:
# different numbers in every place, and memory of their own, which is what a measurement needs.
_DRAWN_EXPERTS = 4


class DenseLayer(NamedTuple):
    """Dense weights: w1 `[E, N, K]` and w2 `[E, K, I]` bf16; biases `[E, N]` and `[E, K]` float32, or None."""

    w1: Tensor
    w2: Tensor
    w1_bias: Tensor | None
    w2_bias: Tensor | None


class Inputs(NamedTuple):
    """One call: x `[M, K]` bf16, topk_weights `[M, topk]` float32, topk_ids `[M, topk]` int32."""

    x: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


class Source(Protocol):
    """Where weights and calls come from."""

    def make_layer(self, shape: ModelShape, seed: int) -> DenseLayer:
        """Weights of one layer."""

    def make_inputs(self, shape: ModelShape, M: int, routing: str, rng: torch.Generator, seed: int) -> Inputs:
        """One call with M tokens; `rng` moves on from call to call, `seed` is the same for all calls of a case."""


class RandomSource:
    """Random weights, tokens and routing: what is measured where no checkpoint is given.

    Args:
        device: where weights are made; tokens and routing are made where their generator is.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def make_layer(self, shape: ModelShape, seed: int) -> DenseLayer:
        return random_layer(shape, seed, self.device)

    def make_inputs(self, shape: ModelShape, M: int, routing: str, rng: torch.Generator, seed: int) -> Inputs:
        return Inputs(random_tokens(M, shape.K, rng), *random_routing(shape, M, routing, rng, seed))


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    """A generator of its own, so that nobody else's draws are disturbed."""
    return torch.Generator(device).manual_seed(seed)


def _weights(E: int, rows: int, cols: int, rng: torch.Generator) -> Tensor:
    drawn = min(E, _DRAWN_EXPERTS)
    pool = (
        torch.randn((drawn, rows, cols), generator=rng, device=rng.device).mul_(cols**-0.5).to(torch.bfloat16)
    )
    out = torch.empty((E, rows, cols), dtype=torch.bfloat16, device=rng.device)
    for e in range(E):
        shift = (e // drawn) % rows
        source = pool[e % drawn]
        out[e, : rows - shift].copy_(source[shift:])
        out[e, rows - shift :].copy_(source[:shift])
    return out


def random_layer(shape: ModelShape, seed: int, device: str = "cpu") -> DenseLayer:
    """A layer with normal weights scaled so that activations stay of order one."""
    rng = generator(seed, device)
    w1 = _weights(shape.E, shape.N, shape.K, rng)
    w2 = _weights(shape.E, shape.K, shape.I, rng)
    if not shape.has_bias:
        return DenseLayer(w1, w2, None, None)
    w1_bias = torch.randn((shape.E, shape.N), generator=rng, device=rng.device)
    w2_bias = torch.randn((shape.E, shape.K), generator=rng, device=rng.device)
    return DenseLayer(w1, w2, w1_bias, w2_bias)


def copy_layer(layer: DenseLayer, shift: int) -> DenseLayer:
    """A layer in memory of its own whose expert e is expert e + shift (modulo E) of `layer`."""
    w1, w2, w1_bias, w2_bias = (None if t is None else torch.roll(t, -shift, dims=0) for t in layer)
    assert w1 is not None
    assert w2 is not None
    return DenseLayer(w1, w2, w1_bias, w2_bias)


def random_tokens(M: int, K: int, rng: torch.Generator) -> Tensor:
    """Hidden states `[M, K]` bf16, normal."""
    return torch.randn((M, K), generator=rng, device=rng.device).to(torch.bfloat16)
