"""MoELayer: equal to the blocks of transformers it is made from and to float64, packed or not, compiled or not."""

from __future__ import annotations

import copy
from typing import Any

import bounds
import oracle
import pytest
import torch
from torch import Tensor, nn

from moe_cpu import MoELayer, MoELayerConfig
from moe_cpu import isa as selection
from moe_cpu.errors import ArgumentError, DeviceError, DTypeError, NoBackward, ShapeError
from moe_cpu.released import dense, is_released

kernels = pytest.mark.skipif(not selection.available(), reason="no kernel runs here")

CONFIGS = {
    "plain": MoELayerConfig(48, 40, 6, 2),
    "shared and gated": MoELayerConfig(48, 40, 6, 3, renormalize=False, shared_intermediate_size=56, shared_gate=True),
    "grouped": MoELayerConfig(
        48, 40, 8, 2, router="grouped", scoring_func="sigmoid", num_expert_group=4, topk_group=2, correction_bias=True,
        routed_scaling_factor=2.5, router_float32=True, shared_intermediate_size=40,
    ),
    "gpt-oss": MoELayerConfig(
        48, 40, 6, 2, activation="swigluoai", bias=True, transposed=True, router_bias=True, router_name="router"
    ),
    "sigmoid top-1": MoELayerConfig(48, 40, 6, 1, router="sigmoid_top1", transposed=True, shared_intermediate_size=40),
    "no gate": MoELayerConfig(48, 40, 6, 2, activation="relu2", shared_intermediate_size=40, shared_activation="relu2"),
}  # fmt: skip
BLOCKS = (
    "Mixtral", "Qwen2-MoE", "Qwen3-MoE", "Qwen3-Next", "OLMoE", "DeepSeek-V2", "DeepSeek-V3", "GLM-4-MoE", "gpt-oss", "GraniteMoE", "MiniMax", "Aria (text)",
)  # fmt: skip


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> MoELayer:
    torch.manual_seed(1)
    layer = MoELayer(CONFIGS[name], dtype=dtype)
    with torch.no_grad():
        for key, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if key.endswith("bias"):
                tensor.normal_(0, 0.1)
    return layer.eval()


def tokens(count: int = 7, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(1, count, 48, generator=torch.Generator().manual_seed(2)).to(dtype)


def block_of(family: str, dtype: torch.dtype, **options: Any) -> Any:
    """The first MoE block of a tiny model of the family."""
    pytest.importorskip("transformers")
    from moe_cpu.integrations.transformers.families import FAMILIES

    found = next(f for f in FAMILIES if f.name == family)
    try:
        model = type(found)(**{**vars(found), "options": found.options | options}).build(dtype)
    except ImportError as error:
        pytest.skip(str(error))
    return next(m for m in model.modules() if isinstance(getattr(m, "experts", None), nn.Module))


def first(out: Any) -> Tensor:
    """Some blocks return their router's scores too."""
    return out[0] if isinstance(out, tuple) else out


@kernels
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_routed_experts_are_within_the_derived_bound_of_float64(name: str) -> None:
    layer, x = make(name), tokens()[0]
    config = layer.config
    routing = getattr(layer, config.router_name)(x)
    w1, w2, b1, b2 = dense(layer.experts, layer.experts.names)
    on_input = config.router == "sigmoid_top1"
    tensors = (routing.topk_weights, routing.topk_ids, config.activation)
    biases = [None if b is None else bounds.f64(b) for b in (b1, b2)]
    want = oracle.moe(x, bounds.f64(w1), bounds.f64(w2), *tensors, *biases, None, on_input)
    bound = bounds.layer_errors(
        x, w1, w2, *tensors, b1, b2, None, on_input, numerics=bounds.Numerics.of(x.dtype, w1.dtype)
    )
    bounds.assert_within(layer.experts(x, routing), want, bound, config=name)


@pytest.mark.parametrize("family", BLOCKS)
@torch.no_grad()
def test_a_layer_made_from_a_block_equals_it(family: str) -> None:
    block, x = block_of(family, torch.float32), tokens(9, torch.float32)
    layer = MoELayer.from_transformers(block)
    torch.testing.assert_close(layer(x), first(block(x)), rtol=1e-4, atol=1e-5)
    assert layer.state_dict().keys() == block.state_dict().keys()
    ours, theirs = dict(layer.named_parameters()), dict(block.named_parameters())
    assert all(ours[key] is theirs[key] for key in theirs)  # not copied
    copied = copy.deepcopy(layer)
    for parameter in copied.parameters():
        parameter.zero_()
    copied.load_state_dict(block.state_dict())
    assert torch.equal(copied(x), layer(x))


@torch.no_grad()
def test_ungated_block_and_llama4_block() -> None:
    block, x = block_of("NemotronH", torch.float32, moe_latent_size=None), tokens(9, torch.float32)
    torch.testing.assert_close(MoELayer.from_transformers(block)(x), block(x), rtol=1e-4, atol=1e-5)
    llama4 = pytest.importorskip("transformers.models.llama4")
    from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

    torch.manual_seed(0)
    block = Llama4TextMoe(
        llama4.Llama4TextConfig(
            hidden_size=48, intermediate_size=40, num_local_experts=6, num_experts_per_tok=1
        )
    )
    for parameter in block.parameters():
        parameter.normal_(0, 0.15)
    layer = MoELayer.from_transformers(block)
    torch.testing.assert_close(layer(x), first(block(x)).view_as(x), rtol=1e-4, atol=1e-5)


def test_blocks_that_route_or_gate_otherwise_are_refused_with_the_reason() -> None:
    with pytest.raises(ArgumentError, match=r"MixtralSparseMoeBlock.*got Linear"):
        MoELayer.from_transformers(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="latent"):
        MoELayer.from_transformers(block_of("NemotronH", torch.float32))
    with pytest.raises(ArgumentError, match="PhimoeSparseMoeBlock"):
        MoELayer.from_transformers(block_of("PhiMoE", torch.float32))
    block = block_of("Mixtral", torch.float32)
    block.experts.act_fn = nn.ReLU()
    with pytest.raises(ArgumentError, match="ReLU"):
        MoELayer.from_transformers(block)


@kernels
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_packing_and_releasing_change_no_bit(name: str) -> None:
    layer, x = make(name), tokens()
    want, weights = layer(x), {k: v.clone() for k, v in layer.state_dict().items()}
    assert torch.equal(layer.pack()(x), want)
    assert torch.equal(layer.pack(release=True)(x), want)
    assert is_released(layer.experts)
    state = layer.state_dict()
    assert all(torch.equal(state[key], value) for key, value in weights.items())
    fresh = MoELayer(layer.config, dtype=torch.bfloat16).pack(release=True)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), want)
    assert torch.equal(copy.deepcopy(layer)(x), want)
    assert torch.equal(layer.unpack()(x), want)
    assert all(torch.equal(p, weights[key]) for key, p in layer.named_parameters())


@kernels
@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_compiled_layer_equals_the_eager_one(name: str, release: bool) -> None:
    layer, x = make(name).pack(release=release), tokens()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@kernels
def test_gradients_come_from_the_reference_backend_or_are_refused() -> None:
    layer, x = make("shared and gated"), tokens()
    layer(x).float().square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    with torch.no_grad():
        layer.pack(release=True)
    with pytest.raises(NoBackward, match="unpack"):
        layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.no_grad()
def test_other_dtypes_keep_their_precision(dtype: torch.dtype) -> None:
    layer, x = make("plain", torch.float32).to(dtype), tokens(dtype=dtype)
    want = copy.deepcopy(layer).double()(x.double())
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(layer(x).double(), want, rtol=tolerance, atol=tolerance)
    assert "not packed" in repr(layer)


@kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_a_compiled_released_layer_notices_changed_biases(dtype: torch.dtype) -> None:
    layer, x = make("gpt-oss").pack(release=True), tokens()
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        setattr(layer.experts, name, nn.Parameter(getattr(layer.experts, name).to(dtype)))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    for bias in (layer.experts.gate_up_proj_bias, layer.experts.down_proj_bias):
        before = layer(x)
        bias.mul_(-3)
        assert not torch.equal(layer(x), before)
        assert torch.equal(compiled(x), layer(x))


@kernels
@torch.no_grad()
def test_a_released_layer_notices_new_biases_at_the_old_address() -> None:
    layer, x = make("gpt-oss").pack(release=True), tokens()
    bias, generator = layer.experts.down_proj_bias, torch.Generator().manual_seed(3)
    layer(x)
    for step in range(50):
        values = torch.randn(bias.shape, generator=generator).to(bias.dtype)
        layer.experts.down_proj_bias = None
        layer.experts.down_proj_bias = nn.Parameter(values.clone() if step % 2 else torch._neg_view(values))
        got = layer(x)
        want = MoELayer(layer.config, dtype=torch.bfloat16)
        want.load_state_dict(layer.state_dict())
        assert torch.equal(got, want(x)), step
    with torch.inference_mode():
        layer.experts.down_proj_bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
        before = layer(x)
        layer.experts.down_proj_bias.add_(2)
        assert not torch.equal(layer(x), before)


@kernels
@pytest.mark.parametrize("release", [False, True])
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_that_would_keep_its_examples_result_is_refused(release: bool) -> None:
    layer, x = make("plain").pack(release=release), tokens()
    with pytest.raises(ArgumentError, match=r"torch\.jit\.trace: .*torch\.compile"):
        torch.jit.trace(layer, (x,))
    assert layer(x).shape == x.shape


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_layer_without_memory_says_what_it_would_give(name: str) -> None:
    layer = MoELayer(CONFIGS[name], device="meta", dtype=torch.bfloat16)
    out = layer(tokens().to("meta"))
    assert (out.device.type, out.shape, out.dtype) == ("meta", (1, 7, 48), torch.bfloat16)
    layer.experts.down_proj = nn.Parameter(layer.experts.down_proj[:, :-1])
    with pytest.raises(ShapeError):
        layer(tokens().to("meta"))
    with pytest.raises(DeviceError, match=r"hidden_states.*device meta \(where the layer is\), got cpu"):
        layer(tokens())


@kernels
def test_repr_says_shapes_scheme_isa_and_memory() -> None:
    layer = make("grouped")
    text = repr(layer)
    for words in (
        "E=8, K=48, I=40, silu", "scheme bf16 on " + selection.active(), "dense 0.1 MiB", "packed copy on first use",
        "grouped, topk=2", "2 of 4 groups",
    ):  # fmt: skip
        assert words in text
    assert "dense released" in repr(layer.pack(release=True))


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(16, 32, dtype=torch.bfloat16), ShapeError, r"K = hidden_size = 64, got \[16, 32\]"),
        (torch.zeros((), dtype=torch.bfloat16), ShapeError, "hidden_size"),
        (torch.zeros(16, 64), DTypeError, "expected bf16, like the layer, got fp32"),
        (3, ArgumentError, "expected a tensor, got int"),
    ],
)
def test_inputs_of_another_kind_are_refused(x: Any, error: type[Exception], words: str) -> None:
    layer = MoELayer(MoELayerConfig(64, 32, 4, 2), dtype=torch.bfloat16)
    with torch.no_grad(), pytest.raises(error, match=f"hidden_states.*{words}"):
        layer(x)


@torch.no_grad()
def test_no_tokens() -> None:
    assert make("plain")(tokens(0)).shape == (1, 0, 48)
