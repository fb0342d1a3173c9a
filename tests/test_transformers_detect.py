"""What the kernels do not cover is recognised, and runs on the reference path with a warning and with gradients."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from transformers_models import build, experts_of, one_call, one_thread, prompt, quiet  # noqa: E402, F401

import moe_cpu.integrations.transformers as integration  # noqa: E402
from moe_cpu.integrations.transformers import detect, forward  # noqa: E402

pytestmark = [quiet, pytest.mark.usefixtures("one_thread")]


class Odd(nn.SiLU):
    """A subclass may compute anything."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def _set(name: str, value: Any) -> Any:
    def change(module: Any) -> None:
        module._modules.pop(name, None)  # a function may replace a module
        setattr(module, name, value)

    return change


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("Mixtral", _set("act_fn", Odd()), "Odd"),
        ("Mixtral", _set("act_fn", torch.tanh), "tanh"),
        ("Mixtral", _set("act_fn", nn.ReLU()), "ReLU"),
        ("Mixtral", _set("_apply_gate", lambda h: h.chunk(2, -1)[0]), "_apply_gate was replaced"),
        ("NemotronH", _set("act_fn", nn.SiLU()), "no gate"),
        ("gpt-oss", _set("limit", 6.0), "limit 6.0"),
        ("gpt-oss", _set("alpha", 1.7), "alpha 1.7"),
        ("DeepSeek-V4", lambda _: None, "_apply_gate, is its own"),
        ("OpenAI privacy filter", lambda _: None, "_apply_gate, is its own"),
    ],
)
@torch.no_grad()
def test_unknown_computation_runs_on_the_reference_path_with_one_warning(
    family: str, change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_warned", set())
    modules = experts_of(build(family))
    for module in modules:
        change(module)
        assert detect.plan_of(module).activation is None
    x, ids, weights = one_call(modules[0])
    module = modules[0]
    with pytest.warns(UserWarning, match=f"{type(module).__name__}.*{reason}"):
        got = module(x, ids, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in modules:
            again(x, ids, weights)
    # Not eager: it spells its activation out and would not see a replaced gate. grouped_mm rounds the sum's terms to bf16.
    module.config._experts_implementation = "grouped_mm"
    torch.testing.assert_close(got.float(), module(x, ids, weights).float(), rtol=2.0**-5, atol=2.0**-5)


def test_post_expert_norm_runs_on_the_reference_path() -> None:
    module = experts_of(build("Mixtral", torch.float32))[0]
    module.has_post_expert_norm, module.post_expert_norm = True, lambda y: y * 3
    x, ids, weights = one_call(module)
    with torch.no_grad():
        tripled = module(x, ids, weights)
        module.post_expert_norm = lambda y: y
        torch.testing.assert_close(tripled, module(x, ids, weights) * 3)


@pytest.mark.parametrize(
    ("hidden_act", "activation"),
    [
        ("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_python", "gelu"), ("gelu_new", "gelu_tanh"), ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_python_tanh", "gelu_tanh"), ("relu2", "relu2"), ("relu", None), ("quick_gelu", None),
        ("gelu_10", None), ("gelu_accurate", None), ("mish", None), ("linear", None),
    ],
)  # fmt: skip
def test_activations_are_told_apart_by_class_and_computed_as_named(
    hidden_act: str, activation: str | None
) -> None:
    act = transformers.activations.ACT2FN[hidden_act]
    assert detect.activation_name(act) == activation
    if activation:
        from moe_cpu.activations import activate

        x = torch.linspace(-9, 9, 181, dtype=torch.float64)
        gated = x if activation == "relu2" else torch.cat((x, torch.ones_like(x)))
        torch.testing.assert_close(activate(gated, activation), act(x), rtol=1e-6, atol=1e-8)


def test_gradients_flow_on_the_reference_path() -> None:
    model = build("Mixtral", torch.float32)
    model.set_experts_implementation("eager")
    model(prompt()).logits.square().sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_experts_implementation(integration.NAME)
    model(prompt()).logits.square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-5)
