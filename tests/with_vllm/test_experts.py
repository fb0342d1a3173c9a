"""The experts class in vLLM's modular kernel, on vLLM's own layer: values and reloading."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from calls import poisoned_empty
from layers import ACTIVATIONS, Model, call, load, loaded_layer, new_layer, process, vllm_case
from strategies import STRIDES, strided
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from moe_cpu.errors import ExpertIdError, ShapeError
from moe_cpu.integrations.vllm.experts import MoeCpuExperts
from moe_cpu.packing import PackedExperts

pytestmark = pytest.mark.usefixtures("vllm_config", "native")


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
def test_a_call_does_not_check_at_length_what_fits(monkeypatch, bias):
    """That takes as long as a small layer."""
    case = vllm_case(M=1, bias=bias)
    layer = loaded_layer(case)
    monkeypatch.setattr(PackedExperts, "from_tensors", None)
    case.check(call(layer, case))


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
