"""Every family on tiny random models: the same results as eager, up to bounds that are derived."""

from __future__ import annotations

from typing import Any

import bounds
import oracle
import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers_models import build, kernels, one_thread, prompt, quiet  # noqa: E402, F401

import moe_cpu.integrations.transformers as integration  # noqa: E402
from moe_cpu import isa as selection  # noqa: E402
from moe_cpu.integrations.transformers import agreement, detect, forward  # noqa: E402
from moe_cpu.integrations.transformers.families import FAMILIES  # noqa: E402
from moe_cpu.released import dense  # noqa: E402

pytestmark = [quiet, pytest.mark.usefixtures("one_thread")]
KERNEL_FAMILIES = [family for family in FAMILIES if family.activation]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
@torch.no_grad()
def test_greedy_tokens_of_a_float32_model_equal_eager(family: Any) -> None:
    model, ids = build(family.name, torch.float32), prompt()
    want = agreement.greedy_tokens(model, ids, "eager", 6)
    assert torch.equal(agreement.greedy_tokens(model, ids, integration.NAME, 6), want)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_bf16_logits_stay_within_the_bound_of_the_depth(family: Any) -> None:
    model = build(family.name)
    distance = agreement.logits_difference(model, prompt())
    assert 0 <= distance <= agreement.bf16_bound(model.config.num_hidden_layers)
    assert torch.isfinite(model(prompt()).logits).all()


@kernels
@pytest.mark.parametrize("family", KERNEL_FAMILIES, ids=lambda f: f.name)
@torch.no_grad()
def test_each_layer_is_within_the_derived_bound_of_float64(family: Any) -> None:
    """On the inputs and the routing that the model itself produces."""
    model = build(family.name)
    assert {layer.activation for layer in integration.explain(model)} == {family.activation}
    calls: list[Any] = []
    with agreement.recorded(model, calls):
        model(prompt())
    assert calls
    for module, x, ids, weights in calls:
        w1, w2, b1, b2 = dense(module, detect.names_of(module))
        case = (x, w1, w2, weights, ids, family.activation, b1, b2)
        want = oracle.moe(
            x,
            bounds.f64(w1),
            bounds.f64(w2),
            weights,
            ids,
            family.activation,
            *(None if b is None else bounds.f64(b) for b in (b1, b2)),
        )
        numerics = bounds.Numerics.of(x.dtype, w1.dtype)
        bounds.assert_within(
            module(x, ids, weights),
            want,
            bounds.layer_errors(*case, numerics=numerics),
            family=family.name,
            isa=selection.active(),
        )


def test_the_logits_bound_notices_a_wrong_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Mixtral")
    monkeypatch.setattr(forward, "plan_of", lambda _: detect.Plan("gelu"))
    assert agreement.logits_difference(model, prompt()) > agreement.bf16_bound(model.config.num_hidden_layers)


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
@torch.no_grad()
def test_generate_with_a_static_cache(name: str) -> None:
    model, ids = build(name), prompt()
    options = dict(
        attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False,
        disable_compile=True,
    )  # fmt: skip
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), want)
