"""MoELayer: router, experts and shared expert as one nn.Module."""

from __future__ import annotations

import keyword
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from moe_cpu import isa, released
from moe_cpu.activations import activate
from moe_cpu.checks import activation_width, default_gate_layout
from moe_cpu.errors import (
    ArgumentError,
    IsaUnavailable,
    NoBackward,
    ShapeError,
    device_error,
    dtype_error,
    dtype_name,
)
from moe_cpu.layer_config import MoELayerConfig
from moe_cpu.pack_cache import packed_for
from moe_cpu.routers import Routing, grouped_topk, sigmoid_top1, softmax_topk
from moe_cpu.stored_op import run_stored


class Router(nn.Module):
    """Logits x @ weight.T + bias, and the choice of experts by them."""

    def __init__(self, config: MoELayerConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        E, K = config.num_experts, config.hidden_size
        self.weight = nn.Parameter(torch.empty(E, K, **factory))
        self.bias = nn.Parameter(torch.empty(E, **factory)) if config.router_bias else None
        if config.correction_bias:
            self.e_score_correction_bias: torch.Tensor | None
            self.register_buffer(
                "e_score_correction_bias", torch.zeros(E, dtype=torch.float32, device=factory.get("device"))
            )
        else:
            self.e_score_correction_bias = None

    def forward(self, x: torch.Tensor) -> Routing:
        """Weights `[M, topk]` float32 and ids `[M, topk]` int32 of `x [M, K]`."""
        c = self.config
        if c.router_float32:
            logits = F.linear(
                x.float(), self.weight.float(), None if self.bias is None else self.bias.float()
            )
        else:
            logits = F.linear(x, self.weight, self.bias)
        if c.router == "softmax":
            return softmax_topk(logits, c.topk, c.renormalize)
        if c.router == "sigmoid_top1":
            return sigmoid_top1(logits)
        return grouped_topk(
            logits, c.topk, c.num_expert_group, c.topk_group, c.renormalize, c.scoring_func, self.e_score_correction_bias,
            c.routed_scaling_factor,
        )  # fmt: skip

    def extra_repr(self) -> str:
        c = self.config
        details = [c.router, f"topk={c.topk}", *(["renormalized"] if c.renormalize else [])]
        if c.router == "grouped":
            details += [
                c.scoring_func,
                f"{c.topk_group} of {c.num_expert_group} groups",
                f"x {c.routed_scaling_factor}",
            ]
        return ", ".join(details)


class Experts(nn.Module):
    """The routed experts' weights, stored as transformers stores them."""

    def __init__(self, config: MoELayerConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        width = activation_width(config.activation)
        E, K, inner = config.num_experts, config.hidden_size, config.intermediate_size
        first = "gate_up_proj" if width == 2 else "up_proj"
        b1, b2 = (first + "_bias", "down_proj_bias") if config.bias else (None, None)
        self.names = released.Names(first, "down_proj", b1, b2, config.transposed)
        shapes = {first: (E, width * inner, K), "down_proj": (E, K, inner)}
        for name, (_, rows, columns) in shapes.items():
            shape = (E, columns, rows) if config.transposed else (E, rows, columns)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
            if config.bias:
                self.register_parameter(name + "_bias", nn.Parameter(torch.empty(E, rows, **factory)))

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The weighted sum over each token's experts, `[M, K]`."""
        backend, packed = "auto", released.packed_of(self)
        if torch.is_grad_enabled() and any(
            t.requires_grad for t in (x, routing.topk_weights, *self.parameters())
        ):
            if packed is not None or torch.compiler.is_compiling():
                raise NoBackward(
                    "the packed and the compiled layer compute no gradient, but one is wanted; call it under torch.no_grad(), "
                    "or unpack() it and call it eagerly"
                )
            backend = "reference"
        return run_stored(
            self, self.names, packed, x, routing.topk_weights, routing.topk_ids, self.config.activation,
            weight_on_input=self.config.router == "sigmoid_top1", backend=backend,
        )  # fmt: skip

    def extra_repr(self) -> str:
        c, packed = self.config, released.packed_of(self)
        shape = f"E={c.num_experts}, K={c.hidden_size}, I={c.intermediate_size}, {c.activation}{', biases' if c.bias else ''}"
        if packed is not None:
            return f"{shape}, scheme {packed.scheme} on {_isa()}, packed {packed.nbytes / 2**20:.1f} MiB, dense released"
        weights = list(self.parameters())
        memory = f"dense {sum(w.nbytes for w in weights) / 2**20:.1f} MiB"
        if weights[0].dtype != torch.bfloat16:
            return f"{shape}, {dtype_name(weights[0].dtype)} (not packed), {memory}"
        return f"{shape}, scheme bf16 on {_isa()}, {memory}, packed copy on first use"


class SharedExpert(nn.Module):
    """The expert of every token: down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, config: MoELayerConfig, **factory: Any) -> None:
        super().__init__()
        self.activation = config.shared_activation
        K, inner, bias = config.hidden_size, config.shared_intermediate_size, config.shared_bias
        self.gated = activation_width(self.activation) == 2
        if self.gated:
            self.gate_proj = nn.Linear(K, inner, bias, **factory)
        self.up_proj = nn.Linear(K, inner, bias, **factory)
        self.down_proj = nn.Linear(inner, K, bias, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up_proj(x)
        if self.gated:
            h = torch.cat((self.gate_proj(x), h), dim=-1)
        return self.down_proj(activate(h.float(), self.activation, "concatenated").to(x.dtype))


class MoELayer(nn.Module):
    """y = sum over chosen experts of weight * expert(x), plus the shared expert if there is one.

    Memory: dense bf16 weights are packed on first use and stay beside the packed copy; ``pack(release=True)`` gives them up.
    Numerics: as `fused_experts`; when a gradient is wanted, the reference backend, which has one.
    """

    def __init__(
        self,
        config: MoELayerConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(config, MoELayerConfig):
            raise ArgumentError(
                f"config: expected MoELayerConfig(hidden_size, intermediate_size, num_experts, topk), got {type(config).__name__}"
            )
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self._add("router_name", Router(config, **factory))
        self.experts = Experts(config, **factory)
        if config.shared_intermediate_size:
            self._add("shared_name", SharedExpert(config, **factory))
            if config.shared_gate:
                self._add("shared_gate_name", nn.Linear(config.hidden_size, 1, bias=False, **factory))
        self.reset_parameters()

    def _add(self, field: str, module: nn.Module) -> None:
        """Adds a module under the name that the configuration gives it."""
        name = getattr(self.config, field)
        free = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
        if not free or name == "experts" or hasattr(self, name):
            raise ArgumentError(
                f"{field}: expected a Python name that no attribute of the layer has, got {name!r}"
            )
        self.add_module(name, module)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of standard deviation 1 / sqrt(columns), zero biases."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                fan_in = parameter.shape[-2 if self.config.transposed and parameter.dim() == 3 else -1]
                parameter.normal_(0, fan_in**-0.5)

    @classmethod
    def from_transformers(cls, block: nn.Module) -> MoELayer:
        """The same layer as a loaded block of transformers, on the block's own parameters; a state_dict of one loads into the other.

        Raises: ArgumentError for a block whose routing or activation is not known, listing the known ones.
        """
        # An integration is imported by those who ask for it, and here somebody does.
        from moe_cpu.integrations.transformers.blocks import config_of

        with torch.device("meta"):
            layer = cls(config_of(block))
        layer.load_state_dict(block.state_dict(keep_vars=True), assign=True)
        return layer.train(block.training)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Args:
            hidden_states: `[..., K]` in the layer's dtype.
        Returns: the same shape and dtype.
        Raises: ShapeError, DTypeError, DeviceError; what `fused_experts` raises; NoBackward when a gradient is wanted from released weights.
        """
        c, weight = self.config, getattr(self, self.config.router_name).weight
        if not isinstance(hidden_states, torch.Tensor):
            raise ArgumentError(f"hidden_states: expected a tensor, got {type(hidden_states).__name__}")
        if hidden_states.dim() == 0 or hidden_states.shape[-1] != c.hidden_size:
            raise ShapeError(
                f"hidden_states: expected [..., K] with K = hidden_size = {c.hidden_size}, got {list(hidden_states.shape)}"
            )
        if hidden_states.device != weight.device:
            raise device_error("hidden_states", weight.device, hidden_states.device, "the layer")
        kind = hidden_states.device.type  # torch knows no autocast on "meta"
        mixed = c.router_float32 or (kind != "meta" and torch.is_autocast_enabled(kind))
        if hidden_states.dtype != weight.dtype and not mixed:
            raise dtype_error(
                "hidden_states", f"{dtype_name(weight.dtype)}, like the layer", hidden_states.dtype
            )
        x = hidden_states.reshape(-1, c.hidden_size)
        out = self.experts(x, getattr(self, c.router_name)(x))
        if c.shared_intermediate_size:
            shared = getattr(self, c.shared_name)(x)
            if c.shared_gate:
                shared = torch.sigmoid(getattr(self, c.shared_gate_name)(x)) * shared
            out = out + shared
        return out.view(hidden_states.shape)

    def pack(self, release: bool = False, progress: bool = False) -> MoELayer:
        """Packs the experts now; with `release` the dense weights are given up, and state_dict unpacks them on demand.

        Raises: what `PackedExperts.pack` raises, DTypeError for weights that are not bf16.
        """
        if released.is_released(self.experts):
            return self
        names, activation = self.experts.names, self.config.activation
        if release:
            from tqdm import tqdm

            with tqdm(
                total=self.config.num_experts, desc="packing experts", unit="expert", disable=not progress
            ) as bar:
                released.release(self.experts, names, default_gate_layout(activation), bar)
        else:
            packed_for(*released.dense(self.experts, names), activation)
        return self

    def unpack(self) -> MoELayer:
        """Brings released dense weights back."""
        released.restore(self.experts)
        return self


def _isa() -> str:
    try:
        return isa.active()
    except IsaUnavailable:
        return "no instruction set (reference)"
