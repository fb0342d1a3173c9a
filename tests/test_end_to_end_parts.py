"""What an end-to-end measurement is made of: random models, planned and measured memory, generation, clocks."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from moe_cpu import isa  # noqa: E402
from moe_cpu.benchmark.end_to_end import high_water, load_and_pack, model_source, needs, random_model  # noqa: E402
from moe_cpu.benchmark.end_to_end.experts_clock import ExpertsClock  # noqa: E402
from moe_cpu.benchmark.end_to_end.generation import generate  # noqa: E402
from moe_cpu.benchmark.end_to_end.settings import ModelSource, Settings  # noqa: E402
from moe_cpu.integrations.transformers import detect, pack  # noqa: E402
from moe_cpu.integrations.transformers.families import FAMILIES  # noqa: E402
from moe_cpu.models import find  # noqa: E402

pytestmark = pytest.mark.skipif(not isa.available(), reason="no kernel runs here")
# Billions of parameters that the publishers give for their models.
BILLIONS = {"qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "mixtral-8x7b": 46.7, "olmoe-1b-7b": 6.9, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread(set_threads):
    set_threads(1)


def tiny_config(**changes):
    sizes = dict(
        vocab_size=512, hidden_size=64, moe_intermediate_size=48, num_hidden_layers=2, num_experts=6, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return transformers.Qwen3MoeConfig(**{**sizes, **changes})


@pytest.mark.parametrize("name", random_model.FAMILIES)
def test_random_models_have_the_published_sizes(name):
    shape = find(name)
    model = model_source.skeleton(model_source.config_of(ModelSource(shape=name)))
    sizes = needs.sizes_of(model)
    assert sizes.parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.06)
    assert (sizes.experts_layers, sizes.E, sizes.topk) == (shape.layers, shape.E, shape.topk)
    layer = next(m for m in model.modules() if detect.is_experts_module(m))
    assert detect.computation_of(layer).activation == shape.activation
    w2 = layer.down_proj.shape[1:]
    assert (w2 if not layer.is_transposed else w2[::-1]) == (shape.K, shape.I)
    assert detect.names_of(layer).w1_bias is None or shape.has_bias


def test_random_weights_are_all_filled_and_all_different(tmp_path):
    model = random_model.build(tiny_config(), 0, "eager")
    for name, weight in model.named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            assert weight.detach().float().std().item() == pytest.approx(scale, rel=0.1), name
            assert len(weight.flatten(0, -2).unique(dim=0)) == weight[..., 0].numel(), name
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        want = model(ids).logits
        model.save_pretrained(tmp_path)
        again = model_source.load(ModelSource(folder=str(tmp_path)), None, "eager")
        assert torch.equal(again(ids).logits, want), "buffers are those of a loaded model"
        assert not torch.equal(random_model.build(tiny_config(), 1, "eager")(ids).logits, want)


def test_numbers_repeat_after_a_prime_number_of_them(monkeypatch):
    monkeypatch.setattr(random_model, "_DRAWN", 1009)
    row, weight = random_model._Row(0), torch.zeros(3, 700, dtype=torch.bfloat16)
    row.fill(weight, 2.0)
    want = (2 * row.numbers.repeat(3)[:2100]).bfloat16()
    assert torch.equal(weight.view(-1), want)
    assert row.place == 2100 % 1009


@pytest.mark.parametrize("name", ["Qwen3-MoE", "gpt-oss", "NemotronH"])
def test_planned_bytes_are_those_that_packing_takes(name):
    try:
        model = next(f for f in FAMILIES if f.name == name).build(torch.bfloat16, "moe_cpu")
    except ImportError as error:
        pytest.skip(str(error))
    sizes = needs.sizes_of(model)
    biases = sum(
        2 * p.nbytes  # kept in float32
        for m in model.modules()
        if detect.is_experts_module(m)
        for p in m.parameters()
        if p.dim() == 2
    )
    assert sizes.packed_bytes + biases == pack(model, progress=False).packed_bytes
    assert sizes.weights_bytes == sum(p.nbytes for p in model.parameters())
    settings = Settings(ModelSource(folder="x"), 64, 1, (2, 3))
    both = needs.plan(sizes, settings, 1 << 40)
    alone = needs.plan(sizes, replace(settings, implementations=("eager",)), 1 << 40)
    assert both.total - alone.total == sizes.packed_bytes
    assert needs.plan(sizes, replace(settings, batches=(30,)), 1 << 40).call == 10 * both.call
    copies = needs.plan(sizes, replace(settings, implementations=("batched_mm",)), 1 << 40).call - alone.call
    assert copies == 3 * 65 * sizes.topk * sizes.experts_bytes // (sizes.experts_layers * sizes.E)


@torch.no_grad()
def test_generation_is_transformers_own_greedy_search():
    model = random_model.build(tiny_config(), 0, "grouped_mm")
    prompt = torch.arange(14).view(2, 7)
    with ExpertsClock(model) as clock:
        found = generate(model, clock, prompt, 4)
        fed = generate(model, clock, prompt, 3, feed=torch.full((2, 3), 5))
    want = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert torch.equal(found.choices, want[:, 7:])
    whole = model(torch.cat((prompt, torch.full((2, 3), 5)), 1)).logits[:, 6:].argmax(-1)
    assert torch.equal(fed.choices, whole)
    assert len(found.steps) == 4


def test_the_clock_counts_time_inside_experts_and_nothing_else(monkeypatch):
    model = random_model.build(tiny_config(), 0, "eager")
    now = iter(range(1000))
    monkeypatch.setattr(
        "moe_cpu.benchmark.end_to_end.experts_clock.time", SimpleNamespace(perf_counter=lambda: next(now))
    )
    with torch.no_grad():
        with ExpertsClock(model) as clock:
            model(torch.arange(3)[None])
            assert clock.take() == 2, "one tick for each of two layers"
            assert clock.take() == 0
        model(torch.arange(3)[None])
        assert next(now) == 4, "its hooks are gone"


def test_the_high_water_mark_rises_and_starts_anew():
    if not high_water.reset():
        pytest.skip("the kernel does not let it be reset")
    size, noise = 64 << 20, 16 << 20
    with high_water.Watch() as watch:
        before = watch.stage()
        held = torch.ones(size // 4)
        time.sleep(0.05)
        del held
        peak, after = watch.stage(), watch.stage()
    for low, high, again in zip(before, peak, after, strict=True):
        assert abs(high - low - size) < noise
        assert abs(again - low) < noise
    assert peak.anonymous < peak.resident


def test_packing_a_loaded_model_takes_one_layer_more_than_the_model(tmp_path):
    """At no time are there more than the model's weights and the packed weights of one layer.

    Every weight of the experts exceeds 32 MiB: smaller ones the C library may keep when they are freed.
    """
    config = tiny_config(
        hidden_size=512,
        moe_intermediate_size=512,
        num_experts=64,
        num_hidden_layers=3,
        max_position_embeddings=64,
    )
    model = random_model.build(config, 0, "eager")
    sizes = needs.sizes_of(model)
    model.save_pretrained(tmp_path)
    del model
    settings = Settings(ModelSource(folder=str(tmp_path)), 8, 2, (1,), ("moe_cpu",), threads=1)
    found = load_and_pack.measure(settings)
    # Code, tables and threads that are there only once something ran.
    slack = 48 << 20
    one = sizes.largest_packed_bytes
    assert slack < 2 * one, "all layers packed beside the dense weights would be noticed"
    assert found.taken == 3
    for stage in ("load", "pack", "run"):
        peak = getattr(found, stage).anonymous - found.before.anonymous
        assert peak <= sizes.weights_bytes + one + slack, f"{stage}: {asdict(found)}"
    assert found.after.anonymous - found.before.anonymous <= sizes.weights_bytes + slack
