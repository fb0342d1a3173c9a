"""What a `moe_cpu.layer.MoELayer` is: its shape and arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from moe_cpu.checks import activation_width, check_count
from moe_cpu.errors import ArgumentError, unknown_name_error
from moe_cpu.routers.grouped_topk import SCORING_FUNCS, check_groups

_COUNTS = (
    "hidden_size", "intermediate_size", "num_experts", "topk", "num_expert_group", "topk_group", "shared_intermediate_size",
)  # fmt: skip
ROUTERS = ("softmax", "grouped", "sigmoid_top1")


@dataclass(frozen=True)
class MoELayerConfig:
    """Shape and arithmetic of a layer. `*_name` are attribute names, so that a state_dict can be another block's.

    router: "softmax", "grouped" (scores by `scoring_func`, see `moe_cpu.routers.grouped_topk`) or "sigmoid_top1", which weighs the input.
    router_float32: compute the logits in float32. transposed: experts' matrices are stored as `[E, in, out]`.
    shared_intermediate_size: width of the shared expert, 0 = none; shared_gate: sigmoid(x @ g.T) scales its result.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    topk: int
    router: str = "softmax"
    renormalize: bool = True
    scoring_func: str = "softmax"
    num_expert_group: int = 1
    topk_group: int = 1
    correction_bias: bool = False
    routed_scaling_factor: float = 1.0
    router_bias: bool = False
    router_float32: bool = False
    activation: str = "silu"
    bias: bool = False
    transposed: bool = False
    shared_intermediate_size: int = 0
    shared_activation: str = "silu"
    shared_bias: bool = False
    shared_gate: bool = False
    router_name: str = "gate"
    shared_name: str = "shared_experts"
    shared_gate_name: str = "shared_expert_gate"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            least = 0 if name == "shared_intermediate_size" else 1
            object.__setattr__(self, name, check_count(name, getattr(self, name), least))
        if self.router not in ROUTERS:
            raise unknown_name_error("router", self.router, ROUTERS)
        activation_width(self.activation)
        activation_width(self.shared_activation)
        if not 1 <= self.topk <= self.num_experts:
            raise ArgumentError(f"topk: expected 1 <= topk <= E = {self.num_experts}, got {self.topk}")
        if self.router == "sigmoid_top1" and self.topk != 1:
            raise ArgumentError(f"topk: expected 1 for router='sigmoid_top1', got {self.topk}")
        if self.router == "grouped":
            check_groups(self.num_experts, self.topk, self.num_expert_group, self.topk_group)
            if self.scoring_func not in SCORING_FUNCS:
                raise unknown_name_error("scoring_func", self.scoring_func, SCORING_FUNCS)
            if not isinstance(self.routed_scaling_factor, int | float):
                raise ArgumentError(
                    f"routed_scaling_factor: expected a number, got {self.routed_scaling_factor!r}"
                )
