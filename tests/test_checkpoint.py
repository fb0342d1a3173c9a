"""One layer of a Hugging Face checkpoint, written by transformers: its weights, its router, and a benchmark run on them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from measuring import make_quick

from moe_cpu.benchmark import Report
from moe_cpu.benchmark.checkpoint import Checkpoint
from moe_cpu.benchmark.inputs import generator
from moe_cpu.cli import main
from moe_cpu.errors import ArgumentError, DTypeError

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40,
    "num_experts_per_tok": 2, "initializer_range": 0.2,
}  # fmt: skip
QWEN = {"intermediate_size": 80, "moe_intermediate_size": 48, "num_experts": 6, "head_dim": 32}
FAMILIES = {
    "qwen3-moe": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}, "softmax_renormalized"),
    "qwen3-moe, weights as they are": ("Qwen3Moe", {**QWEN, "norm_topk_prob": False}, "softmax"),
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": 6}, "softmax_renormalized"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def make_model(family, dtype=torch.bfloat16):
    name, sizes, _ = FAMILIES[family]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


@pytest.fixture(params=[f"{family}{how}" for family in FAMILIES for how in ("", ", sharded")])
def saved(request, tmp_path):
    """A model, its folder, its family."""
    family = request.param.removesuffix(", sharded")
    model = make_model(family)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if family != request.param else "1GB")
    assert (tmp_path / "model.safetensors").exists() == (family == request.param)
    return model, tmp_path, family


@pytest.mark.parametrize("layer", [0, 1])
def test_shape_weights_and_routing_are_the_models(saved, layer):
    model, folder, family = saved
    checkpoint = Checkpoint(folder, layer)
    shape, block = checkpoint.shape, model.model.layers[layer].mlp
    assert (shape.E, shape.topk, shape.K, shape.I, shape.router) == (6, 2, 64, 48, FAMILIES[family][2])
    weights = checkpoint.make_layer(shape, 0)
    assert torch.equal(weights.w1, block.experts.gate_up_proj)
    assert torch.equal(weights.w2, block.experts.down_proj)
    call = checkpoint.make_inputs(shape, 50, "router", generator(1), 0)
    with torch.no_grad():
        _, theirs, ids = block.gate.float()(call.x.float())
    assert torch.equal(call.topk_ids.long(), ids)
    torch.testing.assert_close(call.topk_weights, theirs)
    assert len(ids.unique()) > 2, "a router that always says the same tests nothing"


def test_a_run_on_it(saved, capsys):
    _, folder, family = saved
    results = folder / "results.json"
    arguments = ["--checkpoint", folder, "--layer", 1, "--tokens", "1,9", "--seconds", 0.01, "--threads", 1]
    arguments += ["--backend", "native", "--baseline", "torch_loop", "--json", results]
    assert main(["bench", *map(str, arguments)]) == 0
    assert f"{folder.name}-layer1: E=6 topk=2 K=64 I=48, silu, router routing" in capsys.readouterr().out
    rows = Report.load(results).rows
    assert [row.status for row in rows] == ["ok"] * 4
    assert {row.case.shape.router for row in rows} == {FAMILIES[family][2]}


def test_refusals(tmp_path, monkeypatch, capsys):
    make_model("qwen3-moe", torch.float16).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"layer 2 of .* has no routed experts.*layers\.2\..*experts\.0"):
        Checkpoint(tmp_path, 2)
    checkpoint = Checkpoint(tmp_path, 0)
    with pytest.raises(DTypeError, match=r"experts\.0\.gate_proj\.weight.*bf16.*fp16.*convert"):
        checkpoint.make_layer(checkpoint.shape, 0)
    for option in (["--routing", "zipf"], ["--experts", "4"]):
        assert main(["bench", "--checkpoint", str(tmp_path), *option]) == 1
        assert f"{option[0]} contradicts --checkpoint" in capsys.readouterr().err
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"hidden_act": "gelu"}, "hidden_act silu, got 'gelu'"),
        ({"num_experts_per_tok": 7}, r"1 \.\. E = 6 .*got 7"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ArgumentError, match=message):
            Checkpoint(tmp_path, 0)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "safetensors", None)
        with pytest.raises(ArgumentError, match=r"needs safetensors; install moe-cpu\[checkpoint\]"):
            Checkpoint(tmp_path, 0)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ArgumentError, match=r"model\.safetensors or model\.safetensors\.index\.json"):
        Checkpoint(tmp_path, 0)
