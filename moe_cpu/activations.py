"""The activations between the two GEMMs, in plain torch: computed in float32, rounded once by the caller's choice of output."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_cpu.checks import activation_width, default_gate_layout
from moe_cpu.errors import shape_error

# The clamped GLU of gpt-oss: slope of the sigmoid, and the bound on gate (above) and up (both sides).
SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0


def gate_and_up(h: torch.Tensor, gate_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the gate and the up half of `h [..., N]`: `concatenated` halves, or `interleaved` even and odd columns."""
    if gate_layout == "interleaved":
        return h[..., 0::2], h[..., 1::2]
    half = h.shape[-1] // 2
    return h[..., :half], h[..., half:]


def activate(h: torch.Tensor, activation: str, gate_layout: str | None = None) -> torch.Tensor:
    """The activation of the first GEMM's result, `[..., N] -> [..., I]`, in the dtype of `h`.

    silu(gate) * up; gelu(gate) * up (erf), or its tanh form; swigluoai: g = min(gate, 7), u = clamp(up, -7, 7),
    g * sigmoid(1.702 g) * (u + 1); relu2: max(h, 0)^2.

    Args:
        h: `[..., N]` in the precision to compute in (float32 or float64); not modified.
        activation: a known name.
        gate_layout: where gate and up columns are; None: what the activation means for a dense `w1`.
    Raises: ArgumentError for an unknown activation.
    """
    if activation_width(activation) == 1:
        return F.relu(h).square()
    gate, up = gate_and_up(h, gate_layout or default_gate_layout(activation))
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "gelu":
        return F.gelu(gate) * up
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=SWIGLUOAI_LIMIT)
    up = up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
    return gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate) * (up + 1)


def activate_into(activation: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """Writes the activation of `input [..., N]` to `output [..., I]`: float32 inside (float64 for float64), one rounding.

    Raises: ShapeError when the widths do not fit, ArgumentError for an unknown activation.
    """
    width = activation_width(activation)
    expected = (*input.shape[:-1], input.shape[-1] // width)
    if tuple(output.shape) != expected or input.shape[-1] % width:
        symbols = "[..., N / 2] for input [..., N]" if width == 2 else "[..., I] for input [..., I]"
        raise shape_error("output", symbols, expected, output.shape)
    h = input if input.dtype == torch.float64 else input.float()
    output.copy_(activate(h, activation))
