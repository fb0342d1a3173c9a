"""The Triton backend: the layer on an NVIDIA GPU."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import TYPE_CHECKING, Any

import torch

from moe_cpu.checks import (
    check_batched_call,
    check_call,
    check_expert_ids,
    check_no_scales,
    is_packed,
    resolve_num_experts,
)
from moe_cpu.errors import dtype_name
from moe_cpu.experts.config import ExpertsConfig, check_supported, config_of
from moe_cpu.experts.loop import result_memory
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute

if TYPE_CHECKING:
    from moe_cpu.experts.triton_launch import Plan

CHECK_VARIABLE = "MOE_CPU_CHECK_IDS"


class TritonExperts(FusedMoEPermuteExpertsUnpermute):
    """out[m, s] = act(x[m] @ w1[e].T + b1[e]) @ w2[e].T + b2[e] with e = topk_ids[m, s], for bf16 and fp16 weights on CUDA tensors.

    The host never waits for the GPU, so a call can be captured in a CUDA graph. It also means that values of ids are not seen by it: an id outside
    [0, global_num_experts) is skipped like -1, and so is one that `expert_map` sends outside [0, E), unless ids are checked on request.

    Numerics: float32 accumulation, the activation in float32 and rounded once to the weights' dtype, every expert's result and the weighted sum in float32,
    one rounding of the result. With bf16 weights, x in float32 or fp16 is rounded to bf16 once. The same bits every time.
    Memory: scratch belongs to the instance, a block for each thread and stream, grown on demand and reused: topk * M * (2 * I + 4 * K) bytes and
    up to a block of rows more for each expert. A graph keeps the scratch it was captured with.
    """

    name = "triton"
    has_backward = False

    def __init__(self, plan: Plan | None = None, check_ids: bool | None = None) -> None:
        """
        Args:
            plan: launch parameters instead of those of `triton_launch.TABLE`, for tuning.
            check_ids: read the ids back and raise ExpertIdError for one that is out of range; the host waits for the GPU. None: the environment
                variable MOE_CPU_CHECK_IDS, "1" for yes.
        """
        super().__init__()
        from moe_cpu.experts.triton_scratch import DeviceScratch

        self.plan = plan
        self.check_ids = os.environ.get(CHECK_VARIABLE) == "1" if check_ids is None else check_ids
        self._scratch = DeviceScratch()
        self._admitted: set[tuple[bool, torch.dtype, torch.dtype]] = set()

    @classmethod
    def supports(cls, config: ExpertsConfig) -> tuple[bool, str]:
        """bf16 and fp16 weights on an NVIDIA GPU of compute capability 8.0 or more. Under TRITON_INTERPRET=1 CPU tensors are taken instead, for tests."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if config.packed:
            return False, (
                f"takes dense weights on cuda, got a PackedExperts, a layout for the CPU, with hidden_states on {config.device}; "
                "pass dense w1 and w2 on cuda (PackedExperts.unpack() gives them), or hidden_states on the cpu to the native backend"
            )
        if config.device != "cuda" and not (interpreted and config.device == "cpu"):
            return False, f"runs on cuda tensors only, got {config.device}"
        if config.weight_dtype not in (torch.bfloat16, torch.float16):
            return False, f"weights must be bf16 or fp16, got {dtype_name(config.weight_dtype)}"
        if config.weight_dtype == torch.float16 and config.x_dtype != torch.float16:
            return False, f"fp16 weights need fp16 hidden_states, got {dtype_name(config.x_dtype)}"
        if config.x_dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return False, f"hidden_states must be bf16, fp16 or fp32, got {dtype_name(config.x_dtype)}"
        if importlib.util.find_spec("triton") is None:
            return False, "Triton is not installed; install moe-cpu[triton]"
        return (True, "") if interpreted else _gpu()

    def workspace_shapes(
        self, a: torch.Tensor, aq: torch.Tensor, M: int, N: int, K: int, topk: int, num_experts: int
    ) -> tuple[int, int, torch.dtype]:
        """Workspace13 takes the result; everything else is the instance's own."""
        return (aq.shape[0] * M if aq.dim() == 3 else M * topk) * K, 0, aq.dtype

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
        """The unweighted result in the dtype of the input: `[M, topk, K]`, zero where a pair has no expert here, or `[E, max_num_tokens, K]`, whose rows past
        `expert_num_tokens` are not written.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError; BackendUnavailable for what `supports` refuses; ExpertIdError when ids are checked.
        """
        check_no_scales(
            w1_scale=w1_scale, w2_scale=w2_scale, w1_zp=w1_zp, w2_zp=w2_zp, a1q_scale=a1q_scale, a2_scale=a2_scale
        )  # fmt: skip
        self._refuse_packed(hidden_states, w1, w2, activation)
        if hidden_states.dim() == 3:
            check_batched_call(hidden_states, w1, w2, activation, expert_num_tokens, w1_bias, w2_bias)
            self._admit(hidden_states, w1, w2, activation)
            out = result_memory(hidden_states.shape, hidden_states.dtype, hidden_states.device, workspace13)
            self._layers.batched(
                self._scratch, self.plan, out, hidden_states, w1, w2, expert_num_tokens, activation, w1_bias, w2_bias
            )  # fmt: skip
            return out
        size = check_call(
            hidden_states, w1, w2, None, topk_ids, activation, False, global_num_experts, expert_map, w1_bias, w2_bias
        )  # fmt: skip
        self._admit(hidden_states, w1, w2, activation)
        if self.check_ids:
            self._check_ids(topk_ids, global_num_experts, size.E, expert_map)
        shape = (size.M, size.topk, size.K)
        out = result_memory(shape, hidden_states.dtype, hidden_states.device, workspace13)
        self._layers.routed(
            self._scratch, self.plan, out, hidden_states, w1, w2, None, topk_ids, activation, expert_map, w1_bias, w2_bias
        )  # fmt: skip
        return out

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
        """Writes the weighted sum over topk to `output [M, K]`. The input is already weighted under `apply_router_weight_on_input`.

        Raises: ShapeError, DTypeError, DeviceError, ArgumentError; BackendUnavailable for what `supports` refuses; ExpertIdError when ids are checked.
        """
        self._refuse_packed(hidden_states, w1, w2, activation)
        size = check_call(
            hidden_states, w1, w2, topk_weights, topk_ids, activation, False, global_num_experts, expert_map, w1_bias, w2_bias
        )  # fmt: skip
        self._admit(hidden_states, w1, w2, activation)
        weights = None if apply_router_weight_on_input else topk_weights
        self.layer(
            size.E, output, hidden_states, w1, w2, weights, topk_ids, activation, global_num_experts, expert_map, w1_bias, w2_bias
        )  # fmt: skip

    def layer(
        self,
        E: int,
        output: torch.Tensor,
        x: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor | None,
        topk_ids: torch.Tensor,
        activation: str,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        w1_bias: torch.Tensor | None,
        w2_bias: torch.Tensor | None,
    ) -> None:
        """`apply_weighted` on checked arguments; without `topk_weights` the sum is not weighted.

        Raises: ExpertIdError when ids are checked.
        """
        if self.check_ids:
            self._check_ids(topk_ids, global_num_experts, E, expert_map)
        self._layers.routed(
            self._scratch, self.plan, output, x, w1, w2, topk_weights, topk_ids, activation, expert_map, w1_bias, w2_bias
        )  # fmt: skip

    def known(
        self, x: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, activation: Any, global_num_experts: Any,
        expert_map: Any, w1_bias: Any, w2_bias: Any,
    ) -> torch.Tensor | None:  # fmt: skip
        """The weighted sum `[M, K]`, for arguments like those of a checked call before; None, with nothing done, for all others, whatever they are.

        Whether a gradient is wanted is not looked at.
        """
        if self.check_ids:
            return None
        return self._layers.known(
            self._scratch, self.plan, x, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, w1_bias, w2_bias
        )  # fmt: skip

    def _refuse_packed(self, x: torch.Tensor, w1: Any, w2: Any, activation: str) -> None:
        """Before `check_call`, which takes a pack for right or advises to move it to the GPU."""
        if is_packed(w1, w2):
            check_supported(self, config_of(x, w1, w2, activation))

    def _admit(self, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, activation: str) -> None:
        """Asks `supports` once about each kind of call."""
        kind = (x.is_cuda, x.dtype, w1.dtype)
        if kind not in self._admitted:
            check_supported(self, config_of(x, w1, w2, activation))
            self._admitted.add(kind)

    @functools.cached_property
    def _layers(self) -> Any:
        """The module that needs Triton, which a machine that does not use this backend may lack."""
        from moe_cpu.experts import triton_layer

        return triton_layer

    def _check_ids(
        self, topk_ids: torch.Tensor, global_num_experts: int, E: int, expert_map: torch.Tensor | None
    ) -> None:
        check_expert_ids(topk_ids, resolve_num_experts(global_num_experts, E, expert_map))


def _gpu() -> tuple[bool, str]:
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no CUDA device"
    if torch.version.hip is not None:
        return False, "runs on NVIDIA GPUs only, and this torch is built for AMD's"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return False, f"needs compute capability 8.0 or more, got {major}.{minor}"
    return True, ""
