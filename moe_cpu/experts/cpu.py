"""The experts stage that chooses its backend: per configuration, once, with a reason for every refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_cpu.checks import is_packed
from moe_cpu.combine import weight_and_reduce
from moe_cpu.errors import BackendUnavailable, no_backward_error
from moe_cpu.experts.config import ExpertsConfig, config_of
from moe_cpu.experts.registry import CPU_NAMES, NAMES, check_forced, create, requested, select
from moe_cpu.modular_kernel import FusedMoEPermuteExpertsUnpermute


class SelectedExperts(FusedMoEPermuteExpertsUnpermute):
    """Runs the first backend that supports the call's configuration, or exactly the one asked for.

    Memory: one instance of each backend used; results and temporaries as that backend says.
    """

    candidates: Sequence[str] = NAMES

    def __init__(self, backend: str = "auto", isa: str | None = None) -> None:
        """
        Args:
            backend: a name, or "auto", which the environment variable MOE_CPU_BACKEND may replace.
            isa: an instruction set for the native backend; implies that backend. None: the active one.
        Raises: ArgumentError for an unknown name or an `isa` with another backend; IsaUnavailable.
        """
        super().__init__()
        backend = requested(backend)
        if isa is not None and backend == "auto":
            backend = "native"
        self.backend, self.isa = backend, isa
        self._instances: dict[str, FusedMoEPermuteExpertsUnpermute] = {}
        self._chosen: dict[tuple[object, ...], FusedMoEPermuteExpertsUnpermute] = {}
        self._latest: FusedMoEPermuteExpertsUnpermute | None = None
        if isa is not None:
            self._instance(backend)

    def supports(self, config: ExpertsConfig) -> tuple[bool, str]:
        """Whether some backend, or the one asked for, can run the configuration; the reason lists all of them."""
        try:
            self.select(config)
        except BackendUnavailable as error:
            return False, str(error)
        return True, ""

    def select(self, config: ExpertsConfig) -> str:
        """Name of the backend that runs a configuration. Raises BackendUnavailable with the reasons; never falls back."""
        if self.backend == "auto":
            return select(config, self.candidates)
        check_forced(self.backend, config)
        return self.backend

    def backend_for(
        self,
        hidden_states: torch.Tensor,
        w1: Any,
        w2: Any,
        activation: str,
        w1_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> FusedMoEPermuteExpertsUnpermute:
        """The backend instance that runs a call with these arguments. Raises BackendUnavailable, ArgumentError."""
        packed = is_packed(w1, w2)
        key = (
            hidden_states.device.type, hidden_states.dtype, w1.dtype, activation, w1.shape, None if packed else w2.shape,
            (w1.gate_layout, w1.has_bias) if packed else (w1_bias is not None, w2_bias is not None),
        )  # fmt: skip
        chosen = self._chosen.get(key)
        if chosen is None:
            chosen = self._instance(
                self.select(config_of(hidden_states, w1, w2, activation, w1_bias, w2_bias))
            )
            self._chosen[key] = chosen
        self._latest = chosen
        return chosen

    def workspace_shapes(
        self, a: torch.Tensor, aq: torch.Tensor, M: int, N: int, K: int, topk: int, num_experts: int
    ) -> tuple[int, int, torch.dtype]:
        """What the backend asked for needs. Under "auto", which is decided when the weights are seen: what the backend of the last call needs, and
        nothing before the first. A backend that finds memory of another kind than it wants makes its own."""
        backend = self._latest if self.backend == "auto" else self._instance(self.backend)
        return (
            (0, 0, torch.float32)
            if backend is None
            else backend.workspace_shapes(a, aq, M, N, K, topk, num_experts)
        )

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
        """What the chosen backend's `apply` returns. Raises: NoBackward, BackendUnavailable, and what that raises."""
        backend = self.backend_for(hidden_states, w1, w2, activation, w1_bias, w2_bias)
        self._refuse_backward(
            backend, hidden_states=hidden_states, w1=w1, w2=w2, w1_bias=w1_bias, w2_bias=w2_bias
        )
        if workspace13 is None:
            workspace13 = hidden_states.new_empty(0)
        if workspace2 is None:
            workspace2 = hidden_states.new_empty(0)
        return backend.apply(
            hidden_states, w1, w2, topk_ids, activation, global_num_experts, expert_map, w1_scale, w2_scale, w1_zp,
            w2_zp, a1q_scale, a2_scale, workspace13, workspace2, expert_num_tokens, w1_bias=w1_bias, w2_bias=w2_bias,
        )  # fmt: skip

    def can_weight_and_reduce(self) -> bool:
        """Yes: a backend that does not is followed by the weighted sum in plain torch."""
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
        """Writes the weighted sum over topk to `output [M, K]`. Raises as `apply`."""
        backend = self.backend_for(hidden_states, w1, w2, activation, w1_bias, w2_bias)
        self._refuse_backward(
            backend, hidden_states=hidden_states, w1=w1, w2=w2, topk_weights=topk_weights, w1_bias=w1_bias, w2_bias=w2_bias
        )  # fmt: skip
        if backend.can_weight_and_reduce():
            backend.apply_weighted(
                output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
                apply_router_weight_on_input, w1_bias=w1_bias, w2_bias=w2_bias,
            )  # fmt: skip
            return
        pairs = self.apply(
            hidden_states, w1, w2, topk_ids, activation, global_num_experts, expert_map, w1_bias=w1_bias, w2_bias=w2_bias
        )  # fmt: skip
        weight_and_reduce(output, pairs, topk_weights, topk_ids, apply_router_weight_on_input, expert_map)

    def _instance(self, name: str) -> FusedMoEPermuteExpertsUnpermute:
        if name not in self._instances:
            self._instances[name] = create(name, self.isa)
        return self._instances[name]

    @staticmethod
    def _refuse_backward(backend: FusedMoEPermuteExpertsUnpermute, **tensors: Any) -> None:
        if not torch.is_grad_enabled() or backend.has_backward:
            return
        names = [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]
        if names:
            raise no_backward_error(backend.name, names)


class CPUExperts(SelectedExperts):
    """The experts stage for CPU tensors: native, onednn or reference, whichever comes first and can; ipex on request."""

    candidates = CPU_NAMES
