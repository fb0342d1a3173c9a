"""Packing a model ahead, with and without giving its dense weights up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers_models import LAYOUTS, build, experts_of, kernels, one_thread, prompt, quiet  # noqa: E402, F401

import moe_cpu.integrations.transformers as integration  # noqa: E402
from moe_cpu import packing  # noqa: E402
from moe_cpu.errors import ArgumentError, NoBackward  # noqa: E402
from moe_cpu.released import is_released  # noqa: E402

pytestmark = [quiet, pytest.mark.usefixtures("one_thread")]


@kernels
@torch.no_grad()
def test_pack_ahead_leaves_nothing_for_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAYOUTS:
        model = build(name)
        report = integration.pack(model, progress=False)
        assert len(report.taken) == len(experts_of(model))
        assert not report.left
        assert report.packed_bytes > 0
        assert report.released_bytes == 0
        with monkeypatch.context() as patch:
            patch.setattr(packing.PackedExperts, "pack", None)
            model(prompt())


@kernels
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_release_keeps_results_and_the_state_dict(name: str, tmp_path: Any) -> None:
    model, ids = build(name), prompt()
    want, weights = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    report = integration.pack(model, progress=False, release=True)
    held = sum(p.numel() for m in experts_of(model) for p in m.parameters() if p.dim() == 3)
    assert held == 0
    assert report.released_bytes == sum(
        v.nbytes for k, v in weights.items() if "experts." in k and v.dim() == 3
    )
    assert torch.equal(model(ids).logits, want)
    state = model.state_dict()
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[k], v) and state[k].is_contiguous() for k, v in weights.items())
    clone = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation=integration.NAME
    )
    assert torch.equal(again(ids).logits, want)
    assert integration.unpack(model) == len(report.taken)
    assert all(torch.equal(p, weights[k]) for k, p in model.named_parameters() if k in weights)
    del model
    assert torch.equal(clone(ids).logits, want)


@kernels
@torch.no_grad()
def test_released_weights_load_move_and_serve_other_implementations() -> None:
    model, ids = build("gpt-oss"), prompt()
    want, weights = model(ids).logits, {k: v.clone() for k, v in model.state_dict().items()}
    integration.pack(model, progress=False, release=True)
    half = {k: (v / 2 if "experts" in k else v) for k, v in weights.items()}
    model.load_state_dict(half)
    assert all(is_released(m) for m in experts_of(model))
    assert not torch.equal(model(ids).logits, want)
    model.load_state_dict(weights)
    assert torch.equal(model(ids).logits, want)
    experts_of(model)[0].down_proj_bias.add_(1)  # biases stay parameters, and a change shows
    assert not torch.equal(model(ids).logits, want)
    experts_of(model)[0].down_proj_bias.copy_(next(v for k, v in weights.items() if "down_proj_bias" in k))
    assert torch.equal(model(ids).logits, want)
    with pytest.warns(UserWarning, match="dense again"):
        upcast = copy.deepcopy(model).float()(ids).logits
    assert upcast.dtype == torch.float32
    model.set_experts_implementation("eager")
    assert torch.isfinite(model(ids).logits).all()
    assert not any(is_released(m) for m in experts_of(model))


@kernels
def test_released_weights_refuse_gradients_and_pack_refuses_training() -> None:
    model = build("Mixtral")
    with pytest.raises(ArgumentError, match=r"model\.eval"):
        integration.pack(model.train(), progress=False, release=True)
    integration.pack(model.eval(), progress=False, release=True)
    with pytest.raises(NoBackward, match="unpack"):
        model(prompt())
    integration.unpack(model)
    model(prompt()).logits.sum().backward()


@kernels
def test_pack_reports_what_it_leaves() -> None:
    model = build("DeepSeek-V4")
    report = integration.pack(model, progress=False)
    assert not report.taken
    assert "_apply_gate" in str(report)
    model = build("Mixtral", torch.float32)
    assert "fp32" in integration.pack(model, progress=False).left[0].reason
    model = build("Mixtral")
    model.set_experts_implementation("eager")
    assert "set_experts_implementation" in integration.pack(model, progress=False).left[0].reason
    with pytest.raises(ArgumentError, match="Linear"):
        integration.pack(nn.Linear(2, 2))


def test_pack_shows_a_bar_that_counts_experts(capsys: pytest.CaptureFixture[str]) -> None:
    model = build("Mixtral")
    report = integration.pack(model, release=True)
    if report.taken:
        assert "12/12" in capsys.readouterr().err
