"""Published shapes: what they are made of, how they are found, and that transformers' own configurations say the same."""

from __future__ import annotations

import dataclasses

import pytest

from moe_cpu.checks import ACTIVATIONS
from moe_cpu.errors import ArgumentError
from moe_cpu.models import MODELS, ModelShape, find

ROUTERS = ("softmax", "softmax_renormalized", "grouped_sigmoid", "sigmoid_top1")
# Configuration classes of transformers whose defaults are a published model, and what that model is called here.
CONFIGURATIONS = {
    "mixtral-8x7b": "MixtralConfig",
    "deepseek-v3": "DeepseekV3Config",
    "gpt-oss-120b": "GptOssConfig",
    "qwen3-next-80b-a3b": "Qwen3NextConfig",
    "glm-4.5-air": "Glm4MoeConfig",
    "llama-4-scout": "Llama4TextConfig",
}
# Here a default differs from the published model: the number of layers, the experts' size.
NOT_COMPARED = {"qwen3-30b-a3b": ("Qwen3MoeConfig", "layers"), "olmoe-1b-7b": ("OlmoeConfig", "I")}


@pytest.mark.parametrize("shape", MODELS.values(), ids=list(MODELS))
def test_every_shape_is_complete(shape):
    assert shape.name == shape.name.lower()
    assert 1 <= shape.topk < shape.E
    assert shape.K % 32 == 0
    assert shape.I % 32 == 0
    assert shape.activation in ACTIVATIONS
    assert shape.router in ROUTERS
    assert shape.layers > 1
    owner, _, repository = shape.source.partition("/")
    assert owner
    assert repository.lower().startswith(shape.name.split("-")[0].split(".")[0])


def test_sizes_of_an_expert():
    gated = ModelShape("", E=2, topk=1, K=10, I=3)
    assert (gated.N, gated.expert_elements) == (6, 6 * 10 + 10 * 3)
    plain = dataclasses.replace(gated, activation="relu2")
    assert (plain.N, plain.expert_elements) == (3, 3 * 10 + 10 * 3)
    assert not plain.gated


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-30b-a3b", 29.0), ("mixtral-8x7b", 45.1), ("gpt-oss-120b", 114.7)]
)
def test_the_experts_are_most_of_the_published_size(name, billions):
    shape = find(name)
    assert shape.layers * shape.E * shape.expert_elements / 1e9 == pytest.approx(billions, rel=0.01)


def test_names_are_forgiving_and_an_unknown_one_lists_all():
    for spelling in ("Mixtral-8x7B", " mixtral_8x7b ", "mixtral 8x7b"):
        assert find(spelling) is MODELS["mixtral-8x7b"]
    with pytest.raises(ArgumentError) as refusal:
        find("gpt-2")
    for name in (*MODELS, "'gpt-2'"):
        assert name in str(refusal.value)


def test_fewer_experts():
    shape = find("deepseek-v3")
    part = shape.with_experts(64)
    assert (part.name, part.E, part.topk) == ("deepseek-v3/64-experts", 64, 8)
    assert shape.with_experts(256) is shape
    for E in (7, 257):
        with pytest.raises(ArgumentError, match=rf"topk = 8 \.\. E = 256 of deepseek-v3, got {E}"):
            shape.with_experts(E)


@pytest.mark.parametrize("name", [*CONFIGURATIONS, *NOT_COMPARED])
def test_transformers_agrees(name):
    transformers = pytest.importorskip("transformers")
    known, but = (CONFIGURATIONS[name], None) if name in CONFIGURATIONS else NOT_COMPARED[name]
    config = getattr(transformers, known)()

    def first(*names):
        return next(value for n in names if (value := getattr(config, n, None)) is not None)

    theirs = {
        "E": first("num_local_experts", "n_routed_experts", "num_experts"),
        "topk": config.num_experts_per_tok,
        "K": config.hidden_size,
        "I": first("moe_intermediate_size", "intermediate_size"),
        "layers": config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0),
    }
    theirs.pop(but, None)
    assert theirs == {key: getattr(find(name), key) for key in theirs}
