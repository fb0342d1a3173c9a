"""What an experts module of transformers computes, told apart exactly: by the identity of its gate and the class of its activation.

Whatever is not on the lists here is unknown, and an unknown layer goes to the reference path, never to a kernel that is merely similar.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import activations as hf
from transformers.integrations.moe import _default_apply_gate

from moe_cpu import isa
from moe_cpu.activations import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT
from moe_cpu.errors import IsaUnavailable, dtype_name
from moe_cpu.released import Names, is_released

# Exact classes: a subclass may compute anything. FastGELU's constant is sqrt(2/pi) to ten digits, far below float32's own rounding.
_CLASSES = {
    hf.SiLUActivation: "silu",
    nn.SiLU: "silu",
    hf.GELUActivation: "gelu",
    hf.GELUTanh: "gelu_tanh",
    hf.NewGELUActivation: "gelu_tanh",
    hf.FastGELUActivation: "gelu_tanh",
    hf.ReLUSquaredActivation: "relu2",
}
_GPT_OSS_GATE: Any = None
try:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    _GPT_OSS_GATE = GptOssExperts._apply_gate
except ImportError:  # a transformers without the model has no such gate to recognise
    pass


class Plan(NamedTuple):
    """How a module runs: on the kernels with this activation, or (`activation` None) on the reference path for this reason."""

    activation: str | None
    reason: str = ""


def is_experts_module(module: nn.Module) -> bool:
    """Whether the class of `module` is on transformers' experts interface."""
    return all(
        hasattr(module, name)
        for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
    )


def names_of(module: Any) -> Names:
    """Where an experts module keeps its weights."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    if module.has_bias:
        return Names(first, "down_proj", first + "_bias", "down_proj_bias", module.is_transposed)
    return Names(first, "down_proj", transposed=module.is_transposed)


def plan_of(module: Any) -> Plan:
    """What the kernels would have to compute for an experts module, or why they cannot."""
    computes = computation_of(module)
    if computes.activation is None:
        return computes
    reason = _weights_reason(module)
    return computes if reason is None else Plan(None, reason)


def computation_of(module: Any) -> Plan:
    """The activation of an experts module, whatever its weights are."""
    if getattr(module, "has_post_expert_norm", False):
        return Plan(None, "it normalises the result of each expert")
    if "_apply_gate" in module.__dict__:
        return Plan(None, "its _apply_gate was replaced on the instance")
    if not module.has_gate:
        name = activation_name(module.act_fn)
        if name == "relu2":
            return Plan(name)
        return Plan(
            None, f"it has no gate and its activation is {_class_name(module.act_fn)}; the kernels know relu2"
        )
    gate = type(module)._apply_gate
    if gate is _default_apply_gate:
        if not module.is_concatenated:
            return Plan(None, "it splits interleaved gate and up rows in a way of its own")
        name = activation_name(module.act_fn)
        if name is not None and name != "relu2":
            return Plan(name)
        return Plan(
            None,
            f"its activation is {_class_name(module.act_fn)}; the kernels know silu, gelu and gelu tanh with a gate",
        )
    if gate is _GPT_OSS_GATE and not module.is_concatenated:
        if module.alpha == SWIGLUOAI_ALPHA and module.limit == SWIGLUOAI_LIMIT:
            return Plan("swigluoai")
        return Plan(
            None,
            f"its gate has alpha {module.alpha} and limit {module.limit}; the kernels know {SWIGLUOAI_ALPHA} and {SWIGLUOAI_LIMIT}",
        )
    return Plan(None, f"its gate, {type(module).__name__}._apply_gate, is its own")


def activation_name(act: Any) -> str | None:
    """The kernels' name of an activation, or None for one that is not known."""
    if act is F.silu:
        return "silu"
    if act is F.gelu:
        return "gelu"
    if not isinstance(act, nn.Module) or "forward" in act.__dict__:
        return None
    if type(act) is nn.GELU:
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    return _CLASSES.get(type(act))


def _weights_reason(module: Any) -> str | None:
    """Why the kernels cannot use the module's weights, or None."""
    if is_released(module):
        return None
    names = names_of(module)
    for name in (names.w1, names.w2):
        weight = getattr(module, name)
        if not isinstance(weight, nn.Parameter) and type(weight) is not torch.Tensor:
            return f"{name} is a {type(weight).__name__}"
        if weight.device.type != "cpu":
            return f"{name} is on {weight.device.type}"
        if weight.dtype != torch.bfloat16:
            return f"its weights are {dtype_name(weight.dtype)}, whose precision only the reference path keeps; the kernels take bf16"
    return kernels_reason()


@torch.compiler.assume_constant_result
def kernels_reason() -> str | None:
    """Why no kernel runs on this machine, or None."""
    try:
        isa.active()
    except IsaUnavailable as error:
        return str(error)
    return None


def _class_name(act: Any) -> str:
    return getattr(act, "__name__", None) or type(act).__name__
