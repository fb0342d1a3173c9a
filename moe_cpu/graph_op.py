"""The whole layer as one opaque operator, `torch.ops.moe_cpu.experts_layer`, for graphs that are being traced.

A traced graph cannot look at ids, choose a backend by what a library says, or call ctypes. It records this operator, whose
body is the eager call; its shape rule needs the input alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from moe_cpu.checks import is_packed
from moe_cpu.derived_cache import DerivedCache
from moe_cpu.errors import ArgumentError
from moe_cpu.packing import PackedExperts
from moe_cpu.tensor_checks import check_one_device

if TYPE_CHECKING:
    from collections.abc import Callable


def record(
    hidden_states: torch.Tensor,
    w1: Any,
    w2: Any,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    apply_router_weight_on_input: bool,
    global_num_experts: int,
    expert_map: torch.Tensor | None,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    backend: str,
) -> torch.Tensor:
    """Calls the operator; a `PackedExperts` goes in as its tensors and sizes, which is all a graph can hold."""
    packed = is_packed(w1, w2)
    if packed:
        w1, w2, w1_bias, w2_bias, sizes, layout = (
            w1.w1,
            w1.w2,
            w1.w1_bias,
            w1.w2_bias,
            [w1.K, w1.I],
            w1.gate_layout,
        )
    else:
        sizes, layout = [], ""
    return torch.ops.moe_cpu.experts_layer(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input, global_num_experts,
        expert_map, w1_bias, w2_bias, backend, sizes, layout,
    )  # fmt: skip


_biases: DerivedCache[torch.Tensor] = DerivedCache()


def _float32(bias: torch.Tensor | None) -> torch.Tensor | None:
    """The bias as packed weights have it, made once for each of its versions; those of an inference tensor, which has none, are left to `from_tensors`."""
    if bias is None or bias.dtype == torch.float32 or bias.is_inference():
        return bias
    return _biases.entry((bias,), torch.float32, lambda: bias.detach().float()).value


def define(call: Callable[..., torch.Tensor]) -> None:
    """Defines the operator with `call`, the eager layer, as its body. It has no backward: gradients need an eager call."""

    @torch.library.custom_op("moe_cpu::experts_layer", mutates_args=())
    def experts_layer(
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        apply_router_weight_on_input: bool,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        w1_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
        backend: str,
        packed_sizes: list[int],
        packed_layout: str,
    ) -> torch.Tensor:
        first: Any = w1
        second: Any = w2
        if packed_layout:
            if len(packed_sizes) != 2:
                raise ArgumentError(f"packed_sizes: expected [K, I], got {packed_sizes}")
            K, inner = packed_sizes
            first = PackedExperts.from_tensors(
                w1, w2, _float32(w1_bias), _float32(w2_bias), K, inner, packed_layout
            )
            second = w1_bias = w2_bias = None
        return call(
            hidden_states, first, second, topk_weights, topk_ids, False, activation, apply_router_weight_on_input,
            global_num_experts, expert_map, w1_bias=w1_bias, w2_bias=w2_bias, backend=backend,
        )  # fmt: skip

    @experts_layer.register_fake
    def _(hidden_states: torch.Tensor, *others: Any) -> torch.Tensor:
        check_one_device(hidden_states, *others)
        return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
