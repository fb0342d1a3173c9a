"""The layer on weights as a module stores them, for graphs that are being traced: `torch.ops.moe_cpu.stored_experts`.

A compiled graph makes views anew with a version counter of their own, by which the pack cache would not notice that a weight has changed. So the graph
hands over the parameters themselves, and the transposing happens inside the operator.
"""

from __future__ import annotations

import functools

import torch

from moe_cpu.functional import fused_experts
from moe_cpu.packing import PackedExperts
from moe_cpu.released import Names, dense
from moe_cpu.tensor_checks import check_one_device


def run_stored(
    module: torch.nn.Module,
    names: Names,
    packed: PackedExperts | None,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    weight_on_input: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """`fused_experts` on the weights of `module`, eager or traced.

    Args:
        packed: what the module holds instead of dense weights, or None.
        topk_ids: `[M, topk]` int32 or int64 local ids; E and -1 mean "no expert here".
        weight_on_input, backend: as in `fused_experts`.
    Returns: `[M, K]` in the dtype of `hidden_states`.
    Raises: what `fused_experts` raises.
    """
    if torch.compiler.is_compiling():
        if packed is not None:
            ids = torch.where(topk_ids == packed.E, -1, topk_ids)
            return fused_experts(
                hidden_states, packed, None, topk_weights, ids, activation=activation,
                apply_router_weight_on_input=weight_on_input, backend=backend,
            )  # fmt: skip
        w1, w2, w1_bias, w2_bias = (
            None if name is None else getattr(module, name)
            for name in (names.w1, names.w2, names.w1_bias, names.w2_bias)
        )
        return torch.ops.moe_cpu.stored_experts(
            hidden_states, w1, w2, topk_weights, topk_ids, w1_bias, w2_bias, activation, names.transposed,
            weight_on_input, backend,
        )  # fmt: skip
    w1, w2, w1_bias, w2_bias = (packed, None, None, None) if packed is not None else dense(module, names)
    expert_map = None if hidden_states.is_meta else with_sentinel(w1.shape[0])
    return fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, activation=activation,
        apply_router_weight_on_input=weight_on_input, expert_map=expert_map, w1_bias=w1_bias,
        w2_bias=w2_bias, backend=backend,
    )  # fmt: skip


@functools.cache
def with_sentinel(E: int) -> torch.Tensor:
    """The expert map `[E + 1]` under which id E, "on another rank", is skipped; it costs no pass over the ids."""
    with torch.inference_mode(False):
        return torch.cat((torch.arange(E, dtype=torch.int32), torch.tensor([-1], dtype=torch.int32)))


@torch.library.custom_op("moe_cpu::stored_experts", mutates_args=())
def _stored_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w1_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    activation: str,
    transposed: bool,
    weight_on_input: bool,
    backend: str,
) -> torch.Tensor:
    if transposed:
        # Under a dispatch mode (the first call of a compiled graph, a profiler) a view made here would not share the version counter.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    return fused_experts(
        hidden_states, w1, w2, topk_weights, topk_ids, activation=activation,
        apply_router_weight_on_input=weight_on_input, expert_map=with_sentinel(w1.shape[0]), w1_bias=w1_bias,
        w2_bias=w2_bias, backend=backend,
    )  # fmt: skip


@_stored_experts.register_fake
def _(hidden_states: torch.Tensor, *others: object) -> torch.Tensor:
    check_one_device(hidden_states, *others)
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
