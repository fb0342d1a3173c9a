"""The whole layer in one call."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from moe_cpu import graph_op, ops
from moe_cpu.checks import ProblemSize, check_call, check_no_scales, is_packed
from moe_cpu.combine import weight_input
from moe_cpu.errors import ArgumentError, no_backward_error
from moe_cpu.experts.cpu import SelectedExperts
from moe_cpu.experts.native import at_hand
from moe_cpu.experts.registry import ENVIRONMENT_VARIABLE, requested
from moe_cpu.modular_kernel import FusedMoEModularKernel
from moe_cpu.native_library import REDUCED
from moe_cpu.pack_cache import packed_for
from moe_cpu.packing import PackedExperts, as_packed
from moe_cpu.prepare_finalize import MoEPrepareAndFinalizeNoEP
from moe_cpu.tensor_checks import check_own_memory, refuse_tracing

# The dictionary behind os.environ. For a name that is not set, os.environ raises and catches two exceptions, which takes longer than checking a whole call.
_environment: Any = getattr(os.environ, "_data", None)
_BACKEND = os.environ.encodekey(ENVIRONMENT_VARIABLE)
# The backend asked for -> the experts that checked calls on a GPU got.
_gpu: dict[str, Any] = {}


def fused_experts(
    hidden_states: torch.Tensor,
    w1: Any,
    w2: Any,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """y[m] = sum over s of topk_weights[m, s] * (act(x[m] @ w1[e].T + b1[e]) @ w2[e].T + b2[e]), e = topk_ids[m, s].

    Args:
        hidden_states: x, `[M, K]` bf16, fp16 or float32 (float64 with float64 weights), any strides; on the device "meta" with all other tensors, only
            checks are made and the result has no memory.
        w1: `[E, N, K]`, gate rows then up rows (alternating for swigluoai; `[E, I, K]` for relu2), or a `PackedExperts`.
        w2: `[E, K, I]` in the dtype of `w1`; None with a `PackedExperts`.
        topk_weights: `[M, topk]` float32, bf16 or fp16.
        topk_ids: `[M, topk]` int32 or int64, global expert ids, -1 = no expert.
        inplace: write the result into `hidden_states` and return it; every element needs memory of its own.
        activation: silu, gelu (erf), gelu_tanh, swigluoai or relu2.
        apply_router_weight_on_input: multiply x, instead of the expert's result, by the weight; topk must be 1.
        global_num_experts: experts on all ranks; -1 = the length of `expert_map`, or E without one.
        expert_map: `[global_num_experts]` int32, global to local id, -1 = on another rank: such a pair contributes zero.
        w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale: None; no quantised scheme takes them.
        w1_bias, w2_bias: `[E, N]` and `[E, K]`; packed weights carry their own.
        backend: "auto" (which MOE_CPU_BACKEND may replace) or a name of `moe_cpu.experts.list_backends()`.
    Returns: `[M, K]` contiguous, in the dtype of `hidden_states`.
    Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError, BackendUnavailable, NoBackward.
    Numerics: float32 accumulation; the activation in float32, rounded once to the weights' dtype; weights and sum in
    float32; one rounding of the result. With bf16 weights, x is rounded to bf16 once.
    Memory: no input is modified (but `hidden_states` under `inplace`). Dense bf16 weights are packed on first use and
    the copy kept with them; scratch belongs to the calling thread. A change of a dense weight is noticed by its version, so
    a write through ``weight.data`` or from NumPy is not: call `moe_cpu.pack_cache.forget(weight)` after one.
    """
    if (
        w1_scale is not None or w2_scale is not None or w1_zp is not None or w2_zp is not None
        or a1_scale is not None or a2_scale is not None
    ):  # fmt: skip
        check_no_scales(
            w1_scale=w1_scale, w2_scale=w2_scale, w1_zp=w1_zp, w2_zp=w2_zp, a1_scale=a1_scale, a2_scale=a2_scale
        )  # fmt: skip
    if topk_weights is None:
        raise ArgumentError("topk_weights: expected a tensor, got None; pass ones for an unweighted sum")
    if torch.compiler.is_compiling():
        recorded = graph_op.record(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input, global_num_experts,
            expert_map, w1_bias, w2_bias, backend,
        )  # fmt: skip
        if inplace:
            check_own_memory("hidden_states", hidden_states)
            return hidden_states.copy_(recorded)
        return recorded
    name = "auto" if backend == "auto" and _none_requested() else requested(backend)
    if (
        _gpu and getattr(hidden_states, "is_cuda", False) and name in _gpu and not inplace and not apply_router_weight_on_input
        and not (torch.is_grad_enabled() and _wants_gradient(hidden_states, topk_weights, w1, w2, w1_bias, w2_bias))
    ):  # fmt: skip
        done = _gpu[name].known(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, w1_bias, w2_bias
        )  # fmt: skip
        if done is not None:
            return done
    # What is packed comes from the native library and only it reads it as it is: there is nothing to choose.
    mine = name == "auto" or name == "native"
    packed = at_hand(w1, w2, w1_bias, w2_bias, activation) if mine else None
    if (
        packed is not None
        and not inplace and not apply_router_weight_on_input
        and (global_num_experts == -1 or (expert_map is None and global_num_experts == packed.E))
        and not (torch.is_grad_enabled() and _wants_gradient(hidden_states, topk_weights, w1, w2))
    ):  # fmt: skip
        # Nearly every call: the tensors' properties are left to be checked, which the native call reads anyway.
        done = ops.layer(hidden_states, packed, topk_weights, topk_ids, None, REDUCED, activation, expert_map)
        if done is not None:
            return done
    refuse_tracing()
    size = check_call(
        hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input, global_num_experts,
        expert_map, w1_bias, w2_bias,
    )  # fmt: skip
    if inplace:
        check_own_memory("hidden_states", hidden_states)
    if hidden_states.is_meta:  # nothing to compute
        empty = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        return hidden_states if inplace else empty
    if packed is None:
        experts, kernel = _stages(name)
        chosen = experts.backend_for(hidden_states, w1, w2, activation, w1_bias, w2_bias)
        if chosen.name != "native":
            if chosen.name == "triton" and size.M > 0 and size.topk > 0 and not inplace:
                _gpu[name] = chosen
                return _on_gpu(
                    chosen, size, hidden_states, w1, w2, topk_weights, topk_ids, activation, apply_router_weight_on_input,
                    global_num_experts, expert_map, w1_bias, w2_bias,
                )  # fmt: skip
            return kernel(
                hidden_states, w1, w2, topk_weights, topk_ids, inplace, activation, global_num_experts, expert_map,
                apply_router_weight_on_input=apply_router_weight_on_input, w1_bias=w1_bias, w2_bias=w2_bias,
            )  # fmt: skip
        if is_packed(w1, w2):
            packed = as_packed(w1)
        else:
            _refuse_backward(w1=w1, w2=w2, w1_bias=w1_bias, w2_bias=w2_bias)
            packed = packed_for(w1, w2, w1_bias, w2_bias, activation)
    elif packed is not w1:
        _refuse_backward(w1=w1, w2=w2)
    return _native(
        hidden_states, packed, topk_weights, topk_ids, inplace, activation, apply_router_weight_on_input, expert_map
    )  # fmt: skip


@functools.cache
def _stages(backend: str) -> tuple[SelectedExperts, FusedMoEModularKernel]:
    experts = SelectedExperts(backend)
    return experts, FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)


def _native(
    x: torch.Tensor, packed: PackedExperts, topk_weights: torch.Tensor, topk_ids: torch.Tensor, inplace: bool,
    activation: str, on_input: bool, expert_map: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The native layer on checked arguments, past the modular kernel: it needs no stage of its own before or after."""
    _refuse_backward(hidden_states=x, topk_weights=topk_weights)
    tokens, weights = (weight_input(x, topk_weights), None) if on_input else (x, topk_weights)
    # Every row of x has been read before the first row of the result is written, so the result may take the place of x.
    direct = inplace and x.is_contiguous() and not x.is_neg()
    out = ops.fused_experts(
        tokens, packed, weights, topk_ids, activation=activation, expert_map=expert_map, out=x if direct else None
    )  # fmt: skip
    if direct and not x.is_inference():
        torch.autograd.graph.increment_version(x)  # torch has not seen the write
    return x.copy_(out) if inplace and not direct else out


def _on_gpu(
    experts: Any, size: ProblemSize, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
    topk_ids: torch.Tensor, activation: str, on_input: bool, global_num_experts: int, expert_map: torch.Tensor | None,
    w1_bias: torch.Tensor | None, w2_bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The Triton layer on checked arguments, past the modular kernel: for a few tokens, launches take the GPU less time than its stages take the host."""
    if torch.is_grad_enabled():
        _refuse_backward(
            "triton", hidden_states=x, w1=w1, w2=w2, topk_weights=topk_weights, w1_bias=w1_bias, w2_bias=w2_bias
        )  # fmt: skip
    out = torch.empty((size.M, size.K), dtype=x.dtype, device=x.device)
    experts.layer(
        size.E, out, weight_input(x, topk_weights) if on_input else x, w1, w2, None if on_input else topk_weights, topk_ids,
        activation, global_num_experts, expert_map, w1_bias, w2_bias,
    )  # fmt: skip
    return out


def _none_requested() -> bool:
    """Whether MOE_CPU_BACKEND is surely not set."""
    return _environment is not None and _BACKEND not in _environment


def _wants_gradient(*arguments: Any) -> bool:
    """Whether one of them requires a gradient, whatever they are."""
    for argument in arguments:  # noqa: SIM110 - a generator takes as long again
        # None first: getattr raises and catches an exception for what an object does not have.
        if argument is not None and getattr(argument, "requires_grad", False):
            return True
    return False


def _refuse_backward(backend: str = "native", **tensors: torch.Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    names = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
    if names:
        raise no_backward_error(backend, names)


graph_op.define(fused_experts)
