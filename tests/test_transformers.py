"""The transformers integration on tiny random models of every family: same results as eager, packing and releasing, compiling, generating, refusing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import bounds
import oracle
import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

import moe_cpu.integrations.transformers as integration  # noqa: E402
from moe_cpu import isa as selection  # noqa: E402
from moe_cpu import packing  # noqa: E402
from moe_cpu.errors import ArgumentError, ExpertIdError, NoBackward  # noqa: E402
from moe_cpu.integrations.transformers import agreement, detect, forward  # noqa: E402
from moe_cpu.integrations.transformers.families import FAMILIES, VOCABULARY  # noqa: E402
from moe_cpu.released import dense, is_released  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}
KERNEL_FAMILIES = [family for family in FAMILIES if family.activation]
# One of each way of storing weights: plain, transposed with biases and interleaved, transposed, without a gate and narrower than the model.
LAYOUTS = ("Mixtral", "gpt-oss", "Aria (text)", "NemotronH")
kernels = pytest.mark.skipif(
    not selection.available(), reason=f"no kernel runs here: {detect.kernels_reason()}"
)
pytestmark = pytest.mark.filterwarnings("ignore:.*reference path.*:UserWarning")


@pytest.fixture(autouse=True)
def _one_thread(set_threads: Any) -> None:
    set_threads(1)  # for matrices of 48 columns a second thread is only something to wait for


def prompt(length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(
        2, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(seed)
    )  # no padding, no start


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    try:
        return BY_NAME[name].build(dtype, implementation=integration.NAME)
    except ImportError as error:
        pytest.skip(str(error))


def experts_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if detect.is_experts_module(m)]


def one_call(module: Any, tokens: int = 7, topk: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights for an experts module of the tiny models."""
    generator = torch.Generator().manual_seed(3)
    w1, _, _, _ = dense(module, detect.names_of(module))
    x = torch.randn(tokens, w1.shape[2], generator=generator).to(w1.dtype)
    ids = torch.rand(tokens, w1.shape[0], generator=generator).argsort(-1)[:, :topk]
    return x, ids, torch.rand(tokens, topk, generator=generator)


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


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_expert_parallel_sentinel_is_skipped_and_other_ids_are_refused(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        module = experts_of(build(name, dtype))[0]
        x, ids, weights = one_call(module)
        E = module.num_experts
        with_sentinel = ids.clone()
        with_sentinel[:, 1] = E
        want = module(x, ids[:, :1].contiguous(), weights[:, :1].contiguous())
        got = module(x, with_sentinel, weights)
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)
        assert torch.equal(module(x, torch.full_like(ids, E), weights), torch.zeros_like(x))
        with pytest.raises(ExpertIdError):
            module(x, torch.full_like(ids, E + 1), weights)


@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_ids_weights_and_strides_of_every_kind_give_the_same_result(name: str) -> None:
    module = experts_of(build(name))[0]
    x, ids, weights = one_call(module)
    weights = weights.bfloat16().float()
    want = module(x, ids, weights)
    assert torch.equal(module(x, ids.int(), weights), want)
    assert torch.equal(module(x, ids, weights.bfloat16()), want)
    assert torch.equal(module(x.repeat(1, 2)[:, : x.shape[1]], ids.t().contiguous().t(), weights), want)
    assert torch.equal(module(hidden_states=x, **keywords(module, ids, weights)), want)
    empty = module(x[:0], ids[:0], weights[:0])
    assert empty.shape == (0, x.shape[1])


def keywords(module: Any, ids: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The names of our function, which is what a caller by keyword reaches whatever the class calls them."""
    return {"top_k_index": ids, "top_k_weights": weights}


@kernels
@torch.no_grad()
def test_changed_weights_are_noticed() -> None:
    for name in LAYOUTS:
        module = experts_of(build(name))[0]
        x, ids, weights = one_call(module)
        before = module(x, ids, weights)
        module.down_proj.mul_(2)
        after = module(x, ids, weights)
        assert not torch.equal(before, after)
        fresh = copy.deepcopy(module)(x, ids, weights)
        assert torch.equal(after, fresh)


# -- what the kernels do not cover ---------------------------------------------------------------------------------------------------------


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


# -- packing ahead -------------------------------------------------------------------------------------------------------------------------


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


# -- graphs --------------------------------------------------------------------------------------------------------------------------------


@kernels
@pytest.mark.parametrize("name", LAYOUTS)
@torch.no_grad()
def test_compiled_experts_equal_eager_ones_and_notice_changes(name: str) -> None:
    module = experts_of(build(name))[0]
    x, ids, weights = one_call(module)
    ids[0, 0] = module.num_experts
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))
    module.down_proj.mul_(2)
    assert torch.equal(compiled(x, ids, weights), module(x, ids, weights))


@kernels
@pytest.mark.parametrize("release", [False, True])
@torch.no_grad()
def test_whole_model_compiles_without_a_break(release: bool) -> None:
    model, ids = build("Qwen3-MoE"), prompt()
    want = model(ids).logits
    integration.pack(model, progress=False, release=release)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids).logits, want, rtol=2.0**-6, atol=2.0**-6)


@torch.no_grad()
def test_reference_path_compiles() -> None:
    module = experts_of(build("OpenAI privacy filter"))[0]
    x, ids, weights = one_call(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ids, weights), module(x, ids, weights), rtol=2.0**-6, atol=2.0**-6)


# -- registration --------------------------------------------------------------------------------------------------------------------------


def test_registration_is_by_name_and_nothing_else_is_warned_about() -> None:
    assert integration.NAME in transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS
    model = build("Mixtral")
    assert model.get_experts_implementation()[""] == integration.NAME
    if selection.available():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            model(prompt())
