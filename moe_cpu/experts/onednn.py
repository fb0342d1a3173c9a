"""The oneDNN backend: one prepacked bf16 matrix product for each expert that has tokens, by the oneDNN inside torch."""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_cpu.activations import activate
from moe_cpu.checks import check_batched_call, check_call, check_no_scales
from moe_cpu.derived_cache import DerivedCache
from moe_cpu.errors import dtype_name
from moe_cpu.experts.config import ExpertsConfig, check_supported, config_of
from moe_cpu.experts.loop import result_memory, run_batched, run_routed
from moe_cpu.grouping import local_expert_ids
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute


class OneDNNExperts(FusedMoEPermuteExpertsUnpermute):
    """out[m, s] = act(x[m] @ w1[e].T + b1[e]) @ w2[e].T + b2[e] with e = topk_ids[m, s], for bf16 weights on the CPU.

    Numerics: oneDNN accumulates in float32 and hands each product (bias included) over in bf16. Against the other bf16
    backends that is one more rounding of the first GEMM's result, before the activation (which is computed in float32
    and rounded to bf16), and one of the second's, before the weighted sum. Inputs in float32 or fp16 are rounded to bf16.
    Memory: a reordered copy of both weights, made on first use and again when a weight changes; it lives as long as the
    weight's storage. Weights made under `torch.inference_mode` carry no version, so they are reordered on every call.
    """

    name = "onednn"
    has_backward = False

    @classmethod
    def supports(cls, config: ExpertsConfig) -> tuple[bool, str]:
        """Dense bf16 weights on a CPU whose torch has a working oneDNN with bf16."""
        if config.device != "cpu":
            return False, f"runs on cpu tensors only, got {config.device}"
        if config.packed:
            return (
                False,
                "takes dense weights and reorders them itself; PackedExperts are for the native backend",
            )
        if config.weight_dtype != torch.bfloat16:
            return False, f"weights must be bf16, got {dtype_name(config.weight_dtype)}"
        reason = _why_not()
        return reason is None, reason or ""

    def workspace_shapes(
        self, a: torch.Tensor, aq: torch.Tensor, M: int, N: int, K: int, topk: int, num_experts: int
    ) -> tuple[int, int, torch.dtype]:
        """Workspace13 takes the result; oneDNN allocates its own outputs."""
        return (aq.shape[0] * M if aq.dim() == 3 else M * topk) * K, 0, torch.float32

    @torch.no_grad()
    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w1_zp: torch.Tensor | None = None,
        w2_zp: torch.Tensor | None = None,
        a1q_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        workspace13: torch.Tensor | None = None,
        workspace2: torch.Tensor | None = None,
        expert_num_tokens: torch.Tensor | None = None,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The unweighted result `[M, topk, K]` or `[E, max_num_tokens, K]`, float32; rows without an expert are zero.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError, BackendUnavailable.
        """
        check_no_scales(
            w1_scale=w1_scale, w2_scale=w2_scale, w1_zp=w1_zp, w2_zp=w2_zp, a1q_scale=a1q_scale, a2_scale=a2_scale
        )  # fmt: skip
        if hidden_states.dim() == 3:
            check_batched_call(hidden_states, w1, w2, activation, expert_num_tokens, w1_bias, w2_bias)
        else:
            check_call(
                hidden_states, w1, w2, None, topk_ids, activation, False, global_num_experts, expert_map,
                w1_bias, w2_bias,
            )  # fmt: skip
        check_supported(self, config_of(hidden_states, w1, w2, activation, w1_bias, w2_bias))
        E, K = w2.shape[0], w2.shape[1]
        first, second = _reordered(w1), _reordered(w2)
        b1 = None if w1_bias is None else w1_bias.float()
        b2 = None if w2_bias is None else w2_bias.float()

        def expert(e: int, x: torch.Tensor) -> torch.Tensor:
            h = _linear(x.to(torch.bfloat16), first[e], None if b1 is None else b1[e])
            a = activate(h.float(), activation).to(torch.bfloat16)
            return _linear(a, second[e], None if b2 is None else b2[e]).float()

        if hidden_states.dim() == 3:
            out = result_memory(
                (E, hidden_states.shape[1], K), torch.float32, hidden_states.device, workspace13
            )
            return run_batched(expert, E, hidden_states, expert_num_tokens, out)
        local_ids = local_expert_ids(topk_ids, E, expert_map)
        out = result_memory((*topk_ids.shape, K), torch.float32, hidden_states.device, workspace13)
        return run_routed(expert, E, hidden_states, local_ids, out)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")


@functools.cache
def _why_not() -> str | None:
    """The reason why torch's prepacked product cannot be used, after one exact product of small integers; or None."""
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no bf16 products on this CPU (it needs AVX-512)"
        # Sums of at most 32 products of at most 4 stay below 256, where bf16 represents every integer.
        numbers = torch.arange(48 * 32).remainder(5).sub(2).to(torch.bfloat16)
        weight, x = numbers.view(48, 32), numbers[: 4 * 32].view(4, 32)
        with torch.no_grad():
            got = _linear(x, torch.ops.mkldnn._reorder_linear_weight(weight, None), None)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        return f"torch's prepacked oneDNN product does not run here: {error}".splitlines()[0]
    if not torch.equal(got.float(), x.float() @ weight.float().t()):
        return "torch's prepacked oneDNN product gives wrong numbers here"
    return None


_cache: DerivedCache[list[torch.Tensor]] = DerivedCache()


def _reordered(weight: torch.Tensor) -> list[torch.Tensor]:
    """The reordered matrices of `weight [E, rows, columns]`: kept while the storage lives and its version stands still."""

    def reorder() -> list[torch.Tensor]:
        return [torch.ops.mkldnn._reorder_linear_weight(matrix, None) for matrix in weight.detach().unbind(0)]

    return reorder() if weight.is_inference() else _cache.entry((weight,), None, reorder).value
