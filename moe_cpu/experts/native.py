"""The native backend: this project's own kernels, on the best instruction set of the machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from moe_cpu import isa as isas
from moe_cpu import native_library, ops
from moe_cpu.checks import check_batched_call, check_call, check_no_scales, is_packed
from moe_cpu.errors import IsaUnavailable, dtype_name
from moe_cpu.experts.config import ExpertsConfig
from moe_cpu.experts.loop import result_memory
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute
from moe_cpu.pack_cache import find, packed_for
from moe_cpu.packing import PackedExperts, as_packed

_CACHE_LINE = 64
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class NativeExperts(FusedMoEPermuteExpertsUnpermute):
    """out[m, s] = act(x[m] @ w1[e].T + b1[e]) @ w2[e].T + b2[e] with e = topk_ids[m, s], for bf16 weights on the CPU.

    Numerics: float32 accumulation, the activation in float32 and rounded once to bf16, one rounding of the result; x in float32 or fp16 is rounded
    to bf16 once. Same bits for any number of threads and whatever other tokens are in the call.
    Memory: dense weights are packed on first use (`moe_cpu.pack_cache`). The weighting path works in scratch memory of the calling thread, which
    all layers share: only one of them runs at a time.
    """

    name = "native"
    has_backward = False

    def __init__(self, isa: str | None = None) -> None:
        """
        Args:
            isa: an instruction set; None: the active one at each call.
        Raises: IsaUnavailable with the reason; a forced choice never falls back.
        """
        super().__init__()
        self.isa = None if isa is None else isas.resolve(isa)

    @classmethod
    def supports(cls, config: ExpertsConfig) -> tuple[bool, str]:
        """bf16 weights, dense or packed, on a CPU with AVX2 or better."""
        if config.device != "cpu":
            return False, f"runs on cpu tensors only, got {config.device}"
        if config.weight_dtype != torch.bfloat16:
            return False, (
                f"weights must be bf16, got {dtype_name(config.weight_dtype)}; "
                f"PackedExperts.pack(w1, w2, dtype=torch.bfloat16) rounds them"
            )
        if config.x_dtype not in _INPUT_DTYPES:
            return False, f"hidden_states must be bf16, fp16 or fp32, got {dtype_name(config.x_dtype)}"
        try:
            isas.active()
        except IsaUnavailable as error:
            return False, str(error)
        return True, ""

    def workspace_shapes(
        self, a: torch.Tensor, aq: torch.Tensor, M: int, N: int, K: int, topk: int, num_experts: int
    ) -> tuple[int, int, torch.dtype]:
        """Workspace13 takes the result, workspace2 is the kernels' scratch memory, both in the dtype of the input.

        N rows of w1 may or may not include a gate, so the intermediate size is taken as N: address space, of which only what a call needs is touched.
        """
        batched = aq.dim() == 3
        mode = native_library.BATCHED if batched else native_library.UNREDUCED
        # Batched input says how many experts are here; otherwise there are at most as many as there are ids.
        E = aq.shape[0] if batched else num_experts
        shape = SimpleNamespace(K=K, I=N, E=E, gate_layout_code=native_library.GATE_LAYOUT_CODES["none"])
        scratch = ops.layer_scratch_bytes(M, topk, shape, aq.dtype, mode, self.isa)
        return (E * M if batched else M * topk) * K, -(-scratch // aq.element_size()), aq.dtype

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
        """The unweighted result in the dtype of the input, in `workspace13`: `[M, topk, K]`, zero where a pair has no expert here, or
        `[E, max_num_tokens, K]`, whose rows past `expert_num_tokens` are not written.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError.
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
        packed = _packed(w1, w2, w1_bias, w2_bias, activation)
        shape = hidden_states.shape if batched else (*topk_ids.shape, hidden_states.shape[1])
        out = result_memory(shape, hidden_states.dtype, hidden_states.device, workspace13)
        if out.numel() == 0:
            return out
        if batched:
            if expert_num_tokens is None:
                expert_num_tokens = torch.full((packed.E,), hidden_states.shape[1], dtype=torch.int32)
            return ops.experts_batched(
                hidden_states, packed, expert_num_tokens, activation=activation, out=out, isa=self.isa,
                scratch=_scratch(workspace2),
            )  # fmt: skip
        return ops.experts_unreduced(
            hidden_states, packed, topk_ids, activation=activation, expert_map=expert_map, out=out, isa=self.isa,
            scratch=_scratch(workspace2),
        )  # fmt: skip

    def can_weight_and_reduce(self) -> bool:
        return True

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
        """Writes the weighted sum over topk to `output [M, K]`, in one pass. The input is already weighted under
        `apply_router_weight_on_input`.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError, ExpertIdError.
        """
        packed = at_hand(w1, w2, w1_bias, w2_bias, activation)
        if packed is None or expert_map is not None or global_num_experts not in (-1, packed.E):
            check_call(
                hidden_states, w1, w2, topk_weights, topk_ids, activation, False, global_num_experts, expert_map, w1_bias,
                w2_bias,
            )  # fmt: skip
            packed = packed or _packed(w1, w2, w1_bias, w2_bias, activation)
        direct = output.is_contiguous() and output.dtype == hidden_states.dtype
        result = ops.fused_experts(
            hidden_states, packed, None if apply_router_weight_on_input else topk_weights, topk_ids, activation=activation,
            expert_map=expert_map, out=output if direct else None, isa=self.isa,
        )  # fmt: skip
        if not direct:
            output.copy_(result)


def at_hand(w1: Any, w2: Any, w1_bias: Any, w2_bias: Any, activation: Any) -> PackedExperts | None:
    """The packed form of weights, whatever the arguments are, if it is there already: then `moe_cpu.ops` checks all else about a call."""
    if w1_bias is not None or w2_bias is not None:
        return None
    if isinstance(w1, PackedExperts):
        return w1 if w2 is None else None
    if isinstance(w1, torch.Tensor) and isinstance(w2, torch.Tensor) and isinstance(activation, str):
        return find(w1, w2, activation)
    return None


def _packed(
    w1: Any, w2: Any, w1_bias: torch.Tensor | None, w2_bias: torch.Tensor | None, activation: str
) -> PackedExperts:
    return as_packed(w1) if is_packed(w1, w2) else packed_for(w1, w2, w1_bias, w2_bias, activation)


def _scratch(workspace: torch.Tensor | None) -> torch.Tensor | None:
    """The workspace if the kernels can work in it: on a cache line, which `workspace_shapes` cannot promise for a caller's own memory."""
    if workspace is None or workspace.numel() == 0 or not workspace.is_contiguous():
        return None
    return workspace if workspace.data_ptr() % _CACHE_LINE == 0 else None
