"""The IPEX backend: the fused kernel of Intel Extension for PyTorch 2.8, the last release, for torch 2.8 only.

Importing IPEX replaces kernels of torch in the whole process, so it is imported only when this backend is asked for by
name, and never while looking for one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

import torch

from moe_cpu.checks import check_batched_call, check_call, check_no_scales
from moe_cpu.combine import weight_and_reduce
from moe_cpu.derived_cache import DerivedCache
from moe_cpu.errors import BackendUnavailable, dtype_name
from moe_cpu.experts.config import ExpertsConfig, check_supported, config_of
from moe_cpu.experts.loop import result_memory
from moe_cpu.grouping import local_expert_ids, rows_of_experts
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute

_MODULE = "intel_extension_for_pytorch"
_TORCH_SERIES = "2.8."
# Block of channels in IPEX's packed layout: both sizes of a weight must be whole blocks.
_BLOCK = 32


class IPEXExperts(FusedMoEPermuteExpertsUnpermute):
    """out[m] = sum over s of topk_weights[m, s] * expert[topk_ids[m, s]](x[m]) by IPEX's `fused_experts`; silu, no bias.

    Numerics: float32 accumulation, activation rounded to bf16, as IPEX does it. Where pairs are skipped (id -1, remote
    expert), every remaining pair runs as a token of its own and its result is rounded to bf16 before the weighted sum.
    Memory: a packed copy of both weights, made on first use and again when a weight changes.
    """

    name = "ipex"
    has_backward = False
    only_on_request = "replaces kernels of torch on import, so it is used only when asked for by name"

    @classmethod
    def supports(cls, config: ExpertsConfig) -> tuple[bool, str]:
        """Dense bf16 weights and activations on a CPU, silu, no bias, sizes in multiples of 32. Imports nothing."""
        if config.device != "cpu":
            return False, f"runs on cpu tensors only, got {config.device}"
        if config.packed:
            return (
                False,
                "takes dense weights and packs them itself; PackedExperts are for the native backend",
            )
        for name, dtype in (("weights", config.weight_dtype), ("hidden_states", config.x_dtype)):
            if dtype != torch.bfloat16:
                return False, f"{name} must be bf16, got {dtype_name(dtype)}"
        if config.activation != "silu" or config.has_bias:
            return (
                False,
                f"knows silu without bias only, got {config.activation}{' with bias' if config.has_bias else ''}",
            )
        if config.K % _BLOCK or config.I % _BLOCK:
            return False, f"K and I must be multiples of {_BLOCK}, got K = {config.K}, I = {config.I}"
        reason = _why_not()
        return reason is None, reason or ""

    def workspace_shapes(
        self, a: torch.Tensor, aq: torch.Tensor, M: int, N: int, K: int, topk: int, num_experts: int
    ) -> tuple[int, int, torch.dtype]:
        """Workspace13 takes the result; IPEX allocates its own scratch."""
        return (aq.shape[0] * M if aq.dim() == 3 else M * topk) * K, 0, aq.dtype

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
        """The unweighted result `[M, topk, K]` or `[E, max_num_tokens, K]` in bf16; rows without an expert are zero.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError, BackendUnavailable.
        """
        check_no_scales(
            w1_scale=w1_scale, w2_scale=w2_scale, w1_zp=w1_zp, w2_zp=w2_zp, a1q_scale=a1q_scale, a2_scale=a2_scale
        )  # fmt: skip
        batched = hidden_states.dim() == 3
        if batched:
            check_batched_call(hidden_states, w1, w2, activation, expert_num_tokens, w1_bias, w2_bias)
        else:
            check_call(
                hidden_states, w1, w2, None, topk_ids, activation, False, global_num_experts, expert_map, w1_bias, w2_bias
            )  # fmt: skip
        check_supported(self, config_of(hidden_states, w1, w2, activation, w1_bias, w2_bias))
        E, K = w2.shape[0], w2.shape[1]
        if batched:
            slots = hidden_states.shape[1]
            rows = torch.tensor(rows_of_experts(expert_num_tokens, E, slots))
            local_ids = torch.where(torch.arange(slots) < rows[:, None], torch.arange(E)[:, None], -1)
        else:
            slots = topk_ids.shape[1]
            local_ids = local_expert_ids(topk_ids, E, expert_map)
        out = result_memory(
            (*local_ids.shape, K), hidden_states.dtype, hidden_states.device, workspace13
        ).zero_()
        # Each real pair becomes a token with one expert: IPEX itself has no notion of a pair to skip.
        pairs = (local_ids.reshape(-1) >= 0).nonzero().reshape(-1)
        if pairs.numel() == 0:
            return out
        source = pairs if batched else pairs // slots
        x = hidden_states.reshape(-1, K).index_select(0, source)
        ids = local_ids.reshape(-1, 1).index_select(0, pairs)
        result = _fused(x, w1, w2, torch.ones(ids.shape, dtype=torch.float32), ids)
        return out.view(-1, K).index_copy_(0, pairs, result).view(out.shape)

    def can_weight_and_reduce(self) -> bool:
        """Yes."""
        return True

    @torch.no_grad()
    def apply_weighted(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        *,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> None:
        """Writes the weighted sum to `output [M, K]`. Raises as `apply`."""
        check_call(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, False, global_num_experts, expert_map, w1_bias, w2_bias
        )  # fmt: skip
        check_supported(self, config_of(hidden_states, w1, w2, activation, w1_bias, w2_bias))
        local_ids = local_expert_ids(topk_ids, w2.shape[0], expert_map)
        if topk_ids.numel() == 0 or bool((local_ids < 0).any()):
            pairs = self.apply(hidden_states, w1, w2, topk_ids, activation, global_num_experts, expert_map)
            weight_and_reduce(output, pairs, topk_weights, local_ids, apply_router_weight_on_input)
            return
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_(_fused(hidden_states, w1, w2, weights, local_ids))


@functools.cache
def _why_not() -> str | None:
    """The reason why IPEX cannot be used, from what is installed alone; or None."""
    if importlib.util.find_spec(_MODULE) is None:
        return f"{_MODULE} is not installed"
    if not torch.__version__.startswith(_TORCH_SERIES):
        return f"{_MODULE} needs torch {_TORCH_SERIES}*, the last it was released for; this is torch {torch.__version__}"
    version = importlib.metadata.version(_MODULE)
    if not version.startswith(_TORCH_SERIES):
        return f"{_MODULE} {version} does not belong to torch {torch.__version__}"
    return None


@functools.cache
def _ops() -> Any:
    """`torch.ops.torch_ipex`, importing IPEX on first use."""
    try:
        importlib.import_module(_MODULE)
    except Exception as error:  # with another torch its import fails in unrelated ways, not with ImportError
        raise BackendUnavailable(
            f"backend 'ipex': importing {_MODULE} failed: {type(error).__name__}: {error}"
        ) from error
    return torch.ops.torch_ipex


def _fused(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    packed1, packed2 = _packed(w1, w2)
    return _ops().fused_experts(
        x.contiguous(), packed1, packed2, weights.float().contiguous(), ids.to(torch.int32).contiguous(),
        False, True, False, False, 0, 0, 0, None, None, None, None, None, None,
    )  # fmt: skip


_cache: DerivedCache[tuple[torch.Tensor, torch.Tensor]] = DerivedCache()


def _packed(w1: torch.Tensor, w2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """IPEX's packed form of both weights: kept while their storages live and their versions stand still."""

    def pack() -> tuple[torch.Tensor, torch.Tensor]:
        return _ops().convert_weight_packed_moe_bf16(w1.detach().contiguous(), w2.detach().contiguous())

    return pack() if w1.is_inference() or w2.is_inference() else _cache.entry((w1, w2), None, pack).value
