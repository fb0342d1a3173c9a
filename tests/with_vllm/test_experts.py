"""The experts class in vLLM's modular kernel, on vLLM's own layer: values, capabilities, reloading."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest
import torch
from calls import poisoned_empty
from layers import ACTIVATIONS, Model, call, load, loaded_layer, new_layer, process
from strategies import STRIDES, Case, make_case, strided
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from moe_cpu import isa
from moe_cpu.errors import ExpertIdError, ShapeError
from moe_cpu.integrations.vllm.experts import MoeCpuExperts

pytestmark = pytest.mark.usefixtures("vllm_config", "native")


def vllm_case(**options: Any) -> Case:
    """A case whose biases have the dtype of vLLM's parameters."""
    case = make_case(**options)
    if case.w1_bias is None or case.w2_bias is None:
        return case
    return case.with_(w1_bias=case.w1_bias.bfloat16(), w2_bias=case.w2_bias.bfloat16())


GATED = [name for name in ACTIVATIONS if name != "relu2"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATED)
@pytest.mark.parametrize("M", [1, 33])
def test_values(M, activation, bias):
    case = vllm_case(M=M, activation=activation, bias=bias, K=72, I=40, E=5, topk=3)
    layer = loaded_layer(case)
    assert layer.quant_method.experts_cls is MoeCpuExperts
    with poisoned_empty():
        case.check(call(layer, case))


def test_a_clamped_gate_whose_halves_are_not_interleaved():
    case = vllm_case(M=9, activation="swigluoai", bias=True)
    options = {
        "activation": "swigluoai_uninterleave",
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "swiglu_beta": 1.0,
    }
    halves = {
        name: torch.cat((t[:, 0::2], t[:, 1::2]), 1)
        for name, t in (("w1", case.w1), ("w1_bias", case.w1_bias))
    }
    case.check(call(loaded_layer(case.with_(**halves), **options), case))


def test_experts_without_a_gate(monkeypatch):
    """vLLM makes no such layer on a CPU yet; ours would run it."""
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    case = vllm_case(M=9, activation="relu2", bias=True)
    layer = loaded_layer(case)
    case.check(call(layer, case))


@pytest.mark.parametrize("how", STRIDES)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_strided_arguments_of_either_integer_type(ids_dtype, how):
    case = vllm_case(M=7, E=6, topk=3, ids_dtype=ids_dtype)
    layer = loaded_layer(case)
    contiguous = call(layer, case)
    case.check(contiguous)
    arguments = {name: strided(getattr(case, name), how) for name in ("x", "topk_weights", "topk_ids")}
    assert torch.equal(call(layer, case, **arguments), contiguous)


@pytest.mark.parametrize("routing", ["distinct", "some_skipped", "all_skipped"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_experts_on_other_ranks(ids_dtype, routing):
    case = vllm_case(M=9, E=10, local=4, topk=3, routing=routing, ids_dtype=ids_dtype, bias=True)
    layer = loaded_layer(case)
    with poisoned_empty():
        case.check(call(layer, case))


def test_ranks_add_up():
    """Both halves of the experts, each with its map, give the whole layer."""
    whole = vllm_case(M=6, E=8, topk=4)
    half = whole.E // 2
    total = torch.zeros(whole.x.shape, dtype=torch.float64)
    error = 0.0
    for rank in range(2):
        here = slice(rank * half, (rank + 1) * half)
        expert_map = torch.full((whole.E,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(half, dtype=torch.int32)
        part = whole.with_(w1=whole.w1[here], w2=whole.w2[here], expert_map=expert_map)
        total += call(loaded_layer(part), part).double()
        error = error + part.bound()
    assert (abs(total.numpy() - whole.want()) <= error).all()


def test_an_input_that_carries_the_weight():
    case = vllm_case(M=5, topk=1, weight_on_input=True, weights_dtype=torch.bfloat16)
    case = case.with_(topk_weights=case.topk_weights.float())
    case.check(call(loaded_layer(case), case))


def test_no_token():
    case = vllm_case(M=0)
    out = call(loaded_layer(case), case)
    assert out.shape == case.x.shape
    assert out.dtype == case.x.dtype


def test_an_id_that_is_no_expert_is_refused_and_not_read():
    case = vllm_case(M=3, E=4)
    layer = loaded_layer(case)
    case.topk_ids[1, 0] = 4
    with pytest.raises(ExpertIdError, match=r"topk_ids\[1, 0\].*got 4"):
        call(layer, case)


def test_no_argument_changes():
    case = vllm_case(M=5, topk=1, weight_on_input=True)
    before = [t.clone() for t in (case.x, case.topk_weights, case.topk_ids)]
    call(loaded_layer(case), case)
    for tensor, copy in zip((case.x, case.topk_weights, case.topk_ids), before, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("bias", [False, True])
def test_one_opaque_operator_in_a_graph(bias):
    """Compiled for any number of tokens: same bits, no break, one graph."""
    case = vllm_case(bias=bias)
    layer = loaded_layer(case)
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    graph = torch.compile(
        lambda x, weights, ids: call(layer, case, x=x * 2, topk_weights=weights, topk_ids=ids) + 1,
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for M in (5, 7, 19):
        at = vllm_case(M=M, bias=bias)
        weights, ids = at.topk_weights, at.topk_ids
        want = call(layer, case, x=at.x * 2, topk_weights=weights, topk_ids=ids) + 1
        assert torch.equal(graph(at.x, weights, ids), want)
    assert counter.frame_count == 1


# -- loading ------------------------------------------------------------------------------------------------------------------------------
def test_dense_weights_are_let_go():
    case = vllm_case()
    layer = new_layer(case)
    load(layer, case)
    storages = [weakref.ref(layer.get_parameter(n).untyped_storage()) for n in ("w13_weight", "w2_weight")]
    process(layer)
    gc.collect()
    assert [storage() for storage in storages] == [None, None]
    assert layer.w13_weight.dim() == 2


def test_processing_twice_changes_nothing():
    case = vllm_case(bias=True)
    layer = loaded_layer(case)
    before = call(layer, case)
    process(layer)
    assert torch.equal(call(layer, case), before)


def test_loading_into_a_layer_in_use():
    """Parameters that somebody holds since before take dense weights again; what is not loaded stays as it was."""
    old, new = vllm_case(seed=1, bias=True), vllm_case(seed=2, bias=True)
    layer = loaded_layer(old)
    parameters = dict(layer.named_parameters())
    load(layer, new, experts=[1, 3])
    assert layer.w13_weight.shape == old.w1.shape
    process(layer)
    assert all(layer.get_parameter(name) is parameter for name, parameter in parameters.items())
    mixed = {}
    for name in ("w1", "w2", "w1_bias", "w2_bias"):
        mixed[name] = getattr(old, name).clone()
        mixed[name][[1, 3]] = getattr(new, name)[[1, 3]]
    old.with_(**mixed).check(call(layer, old))


def test_a_layer_loaded_but_not_processed_is_refused():
    case = vllm_case()
    layer = loaded_layer(case)
    load(layer, case)
    with pytest.raises(ShapeError, match=r"packed w1: expected \[E, elements\]"):
        call(layer, case)


@pytest.mark.parametrize("bias", [False, True])
def test_reloading_as_vllm_does(bias, one_rank):
    """`reload_weights`: new dense parameters, whose processed form goes into the memory in use."""
    old, new = vllm_case(seed=1, bias=bias), vllm_case(seed=2, bias=bias)
    layer = loaded_layer(old)
    in_use = {name: (parameter, parameter.data_ptr()) for name, parameter in layer.named_parameters()}
    old.check(call(layer, old))
    for case in (new, old):  # there and back
        model = Model(layer)
        initialize_layerwise_reload(model)
        load(layer, case)
        finalize_layerwise_reload(model, one_rank.model_config)
        for name, (parameter, address) in in_use.items():
            assert layer.get_parameter(name) is parameter
            assert parameter.data_ptr() == address
        case.check(call(layer, case))


# -- what it says it can ------------------------------------------------------------------------------------------------------------------
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
