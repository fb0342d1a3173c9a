"""What a backend is asked about: the facts of a layer that decide who can run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moe_cpu.checks import activation_width, default_gate_layout, is_packed
from moe_cpu.errors import BackendUnavailable


@dataclass(frozen=True)
class ExpertsConfig:
    """Facts of a layer. `gate_layout` is `concatenated`, `interleaved` or `none`; `topk` is None when not known."""

    device: str
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    packed: bool
    activation: str
    has_bias: bool
    gate_layout: str
    E: int
    K: int
    I: int
    topk: int | None = None


class BackendStatus(NamedTuple):
    """Whether a backend can run here, and if not, the sentence that says why."""

    name: str
    available: bool
    reason: str


def config_of(
    hidden_states: torch.Tensor,
    w1: Any,
    w2: Any,
    activation: str,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    topk: int | None = None,
) -> ExpertsConfig:
    """The facts of one call's arguments.

    Args:
        hidden_states: `[M, K]` or batched `[E, max_num_tokens, K]`.
        w1, w2: dense weights, or a `PackedExperts` and None.
    Raises: ArgumentError for an unknown activation.
    """
    width = activation_width(activation)
    packed = is_packed(w1, w2)
    E, N, K = w1.shape[0], w1.shape[1], (w1.K if packed else w2.shape[1])
    return ExpertsConfig(
        device=hidden_states.device.type,
        x_dtype=hidden_states.dtype,
        weight_dtype=w1.dtype,
        packed=packed,
        activation=activation,
        has_bias=w1.has_bias if packed else w1_bias is not None or w2_bias is not None,
        gate_layout=w1.gate_layout if packed else default_gate_layout(activation),
        E=E,
        K=K,
        I=N // width,
        topk=topk,
    )


def check_supported(experts: Any, config: ExpertsConfig) -> None:
    """Raises BackendUnavailable with the reason when `experts`, called past the choice of a backend, cannot run `config`."""
    supported, reason = experts.supports(config)
    if not supported:
        raise BackendUnavailable(f"backend {experts.name!r} cannot run this layer: {reason}")
