"""What the experts class says it can, with reasons, and where its layers stay with vLLM's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from layers import new_layer, vllm_case
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat

from moe_cpu import isa
from moe_cpu.integrations.vllm.experts import MoeCpuExperts

pytestmark = pytest.mark.usefixtures("vllm_config", "native")


def config(**changes: Any) -> Any:
    """A FusedMoEConfig of one rank, changed after it was made: vLLM makes none without a gate on a CPU."""
    made = FusedMoEConfig(
        num_experts=4,
        experts_per_token=2,
        hidden_dim=64,
        intermediate_size=48,
        num_local_experts=4,
        num_logical_experts=4,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=None,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def verdict(
    moe_config: Any, weight_key: Any = None, form: Any = FusedMoEActivationFormat.Standard
) -> tuple[bool, str]:
    return MoeCpuExperts.is_supported_config(MoeCpuExperts, moe_config, weight_key, None, form)


COVERED = {"silu", "gelu", "gelu_tanh", "swigluoai", "relu2_no_mul"}


@pytest.mark.parametrize("activation", list(MoEActivation), ids=lambda a: a.value)
def test_activations(activation):
    supported, reason = verdict(config(activation=activation))
    assert supported == (activation.value in COVERED)
    if not supported:
        assert "activation" in reason or "clamped gate" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"in_dtype": torch.float16}, "dtype is fp16, the kernels take bf16; pass --dtype bfloat16"),
        ({"in_dtype": torch.float32}, "dtype is fp32"),
        ({"swiglu_limit": 7.0}, "clamped at 7.0"),
        ({"activation": MoEActivation.SWIGLUOAI, "swiglu_limit": 8.0}, r"\(8.0, 1.702, 1.0\)"),
        ({"activation": MoEActivation.SWIGLUOAI, "swiglu_alpha": 1.0}, r"\(7.0, 1.0, 1.0\)"),
        ({"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE, "swiglu_limit": 7.0}, r"\(7.0, None, None\)"),
        ({"is_lora_enabled": True}, "LoRA"),
    ],
)
def test_refusals_say_why(changes, reason):
    supported, text = verdict(config(**changes))
    assert not supported
    assert re.search(reason, text)


def test_quantised_and_batched_layers_are_refused():
    assert not verdict(config(), weight_key=object())[0]
    assert not verdict(config(), form=FusedMoEActivationFormat.BatchedExperts)[0]


def test_a_machine_without_an_instruction_set_is_refused(monkeypatch):
    monkeypatch.setattr(isa, "available", lambda: ())
    supported, reason = verdict(config())
    assert not supported
    assert "current device" in reason


def test_a_layer_not_covered_stays_with_vllm():
    layer = new_layer(vllm_case(K=64, I=64), swiglu_limit=3.0)
    assert issubclass(layer.quant_method.experts_cls, CPUUnquantizedExperts)


def test_a_layer_with_its_backend_asked_for_stays_with_vllm(vllm_config, monkeypatch):
    """vLLM does not know that word on a CPU, and it is vLLM that says so."""
    monkeypatch.setattr(vllm_config.kernel_config, "moe_backend", "flashinfer_trtllm")
    with pytest.raises(ValueError, match="FlashInfer TRTLLM"):
        new_layer(vllm_case())
