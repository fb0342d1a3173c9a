"""fused_experts: dense and packed weights, every option, gradients, and what it leaves alone."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import bounds
import pytest
import torch
from calls import call, modular, pack
from hypothesis import given
from strategies import STRIDES, cases, make_case, strided
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_cpu import FusedMoEModularKernel, PackedExperts, fused_experts
from moe_cpu.errors import ArgumentError, NoBackward
from moe_cpu.experts import create

BACKENDS = ("native", "reference")


def test_published_signatures():
    """Names, order and defaults that callers rely on."""
    empty = inspect.Parameter.empty
    names = list(inspect.signature(fused_experts).parameters)
    assert names == [
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "inplace", "activation", "apply_router_weight_on_input",
        "global_num_experts", "expert_map", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "w1_bias",
        "w2_bias", "backend",
    ]  # fmt: skip
    forward = inspect.signature(FusedMoEModularKernel.forward).parameters
    assert list(forward)[1:17] == [
        "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "inplace", "activation", "global_num_experts",
        "expert_map", "w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "apply_router_weight_on_input",
    ]  # fmt: skip
    for parameters in (inspect.signature(fused_experts).parameters, forward):
        defaults = {name: p.default for name, p in parameters.items() if p.default is not empty}
        common = {
            "inplace": False,
            "activation": "silu",
            "global_num_experts": -1,
            "apply_router_weight_on_input": False,
        }
        assert {name: defaults[name] for name in common} == common
        assert all(value is None for name, value in defaults.items() if name not in (*common, "backend"))


@given(case=cases())
def test_dense_and_packed_weights_give_the_same_bits(case):
    dense = call(case)
    case.check(dense)
    assert torch.equal(call(case, packed=pack(case)), dense)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["x", "w1", "w2", "topk_ids", "topk_weights", "expert_map", "w1_bias", "w2_bias"]
)
def test_strides_of_every_input(backend, name):
    case = make_case(M=9, K=40, I=24, E=5, local=3, bias=True, seed=81)
    want = call(case, backend=backend)
    tensor = getattr(case, name)
    for how in STRIDES if tensor.dim() > 1 else ("columns", "padded"):
        assert torch.equal(call(case.with_(**{name: strided(tensor, how)}), backend=backend), want), how


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_per_token_as_a_column_of_something_larger(backend):
    """[M, 1] tensors call themselves contiguous whatever their strides say."""
    case = make_case(M=9, E=5, topk=3, seed=82)
    one = case.with_(topk_ids=case.topk_ids[:, :1], topk_weights=case.topk_weights[:, :1])
    one.check(call(one, backend=backend))
    # One token whose slots lie in a column: [1, topk] with a stride along topk.
    column = {
        "topk_ids": case.topk_ids.T.contiguous().T[:1],
        "topk_weights": case.topk_weights.T.contiguous().T[:1],
    }
    token = case.with_(x=case.x[:1], **column)
    assert token.topk_ids.stride(1) == 9
    token.check(call(token, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weight_on_input(backend, dtype):
    case = make_case(M=20, topk=1, x_dtype=dtype, weight_on_input=True, seed=83)
    case.check(call(case, backend=backend))
    assert not torch.equal(
        call(case.with_(weight_on_input=False), backend=backend), call(case, backend=backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_not_modified(backend):
    case = make_case(M=8, topk=1, weight_on_input=True, local=3, E=4, bias=True, seed=84)
    before = {name: value.clone() for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    call(case, backend=backend)
    for name, value in before.items():
        assert torch.equal(getattr(case, name), value), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_inplace(backend):
    case = make_case(M=8, seed=85)
    want = call(case, backend=backend)
    case = case.with_(x=case.x.clone())
    got = call(case, backend=backend, inplace=True)
    assert got is case.x
    assert torch.equal(got, want)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "shape", [{"M": 1, "K": 64}, {"M": 70, "K": 96, "local": 2}, {"M": 1500, "K": 2304, "I": 32, "topk": 4}]
)
def test_inplace_into_what_is_still_read(set_threads, threads, dtype, shape):
    """The native result takes the place of x directly: every row of x is read before, also when columns come in slices."""
    set_threads(threads)
    case = make_case(**shape, x_dtype=dtype, seed=85)
    want = call(case, backend="native")
    case = case.with_(x=case.x.clone())
    before = case.x._version
    assert call(case, backend="native", inplace=True) is case.x
    assert torch.equal(case.x, want)
    assert case.x._version > before, "autograd must learn of the write"


def test_a_refused_inplace_call_writes_nothing():
    case = make_case(M=8, seed=85)
    ids = case.topk_ids.clone()
    ids[7, 1] = 99
    case = case.with_(x=case.x.clone(), topk_ids=ids)
    before = case.x.clone()
    with pytest.raises(IndexError):
        call(case, backend="native", inplace=True)
    assert torch.equal(case.x, before)


def test_inplace_on_strided_memory():
    case = make_case(M=8, seed=85)
    want = call(case, backend="native")
    view = strided(case.x, "columns")
    assert call(case.with_(x=view), backend="native", inplace=True) is view
    assert torch.equal(view, want)


class Subclass(PackedExperts):
    pass


def quacking(packed):
    names = (
        "E",
        "K",
        "I",
        "N",
        "shape",
        "dtype",
        "gate_layout",
        "has_bias",
        "requires_grad",
        "w1",
        "w2",
        "w1_bias",
        "w2_bias",
    )
    return SimpleNamespace(unpack=packed.unpack, **{name: getattr(packed, name) for name in names})


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("kind", ["subclass", "duck"])
def test_what_looks_like_packed_experts(backend, kind):
    case = make_case(M=6, bias=True, seed=85)
    packed = pack(case)
    want = call(case, packed=packed, backend=backend)
    other = Subclass.from_state_dict(packed.state_dict()) if kind == "subclass" else quacking(packed)
    assert torch.equal(call(case, packed=other, backend=backend), want)
    with pytest.raises(ArgumentError, match="w2"):
        call(case.with_(w1=other), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("M", "topk"), [(0, 2), (3, 0), (0, 0)])
@pytest.mark.parametrize("inplace", [False, True])
def test_nothing_to_do(backend, M, topk, inplace):
    case = make_case(M=M, seed=86)
    case = case.with_(
        topk_ids=torch.zeros((M, topk), dtype=torch.int32),
        topk_weights=torch.zeros((M, topk)),
        x=case.x.clone(),
    )
    got = call(case, backend=backend, inplace=inplace)
    assert got.shape == case.x.shape
    assert (got is case.x) == inplace
    assert not got.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_two_ranks_add_up_to_the_whole(backend, map_dtype):
    case = make_case(M=25, E=6, topk=3, x_dtype=torch.float32, bias=True, seed=87)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(87))
    total = torch.zeros(case.M, case.K, dtype=torch.float64)
    error = 0.0
    for mine in (order[:2], order[2:]):
        expert_map = torch.full((6,), -1, dtype=map_dtype)
        expert_map[mine] = torch.arange(len(mine), dtype=map_dtype)
        part = case.with_(
            w1=case.w1[mine], w2=case.w2[mine], w1_bias=case.w1_bias[mine], w2_bias=case.w2_bias[mine],
            expert_map=expert_map,
        )  # fmt: skip
        got = call(part, backend=backend, global_num_experts=6)
        part.check(got)
        total, error = total + got.double(), error + part.bound()
    bounds.assert_within(total, case.want(), error)


@pytest.mark.parametrize("name", ["x", "w1", "w2", "topk_weights", "w1_bias"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_wanted_gradient_is_refused_by_name(name, packed):
    if packed and name not in ("x", "topk_weights"):
        name = "x"
    case = make_case(M=4, bias=True)
    case = case.with_(**{name: getattr(case, name).clone().requires_grad_()})
    label = {"x": "hidden_states"}.get(name, name)
    with pytest.raises(NoBackward, match=rf"{label} require.*no_grad.*reference"):
        call(case, packed=pack(case) if packed else None, backend="native")
    with torch.no_grad():
        case.check(call(case, backend="native"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode(backend):
    with torch.inference_mode():
        case = make_case(M=4, seed=88)
        packed = pack(case) if backend == "native" else None
        case.check(call(case, packed=packed, backend=backend))
    outside = make_case(M=4, seed=89)
    outside.check(call(outside, backend=backend))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights", "expert_map"])
def test_no_tensor_without_memory_is_taken_for_an_absent_one(name):
    case = make_case(M=4, E=5, local=3)
    packed = pack(case)
    fake = FakeTensorMode().from_tensor(getattr(case, name))
    with pytest.raises(ArgumentError, match="memory"):
        call(case.with_(**{name: fake}), packed=packed)


@pytest.mark.parametrize("name", ["x", "topk_weights"])
def test_other_layouts_are_refused_by_name(name):
    case = make_case(M=4)
    packed = pack(case)
    with pytest.raises(
        ArgumentError, match=rf"{'hidden_states' if name == 'x' else name}.*strided.*sparse_coo.*to_dense"
    ):
        call(case.with_(**{name: getattr(case, name).to_sparse()}), packed=packed)


@pytest.mark.parametrize("name", ["x", "topk_weights", "topk_ids"])
def test_a_pending_negation_is_carried_out_by_a_kernel_too(name):
    case = make_case(M=4)
    pending = case.with_(**{name: torch._neg_view(-getattr(case, name))})
    assert torch.equal(modular(pending, create("native")), modular(case, create("native")))


@pytest.mark.parametrize("name", ["w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale"])
def test_scales_are_refused_by_name(name):
    with pytest.raises(ArgumentError, match=name):
        call(make_case(), **{name: torch.ones(1)})


def test_packing_in_bf16_is_the_callers_decision():
    """float32 weights keep their precision until they are packed."""
    case = make_case(M=16, K=96, I=64, x_dtype=torch.float32, w_dtype=torch.float32, seed=90)
    assert bounds.relative_rms(call(case), case.want()) < 1e-6
    packed = PackedExperts.pack(case.w1, case.w2, dtype=torch.bfloat16)
    rounded = case.with_(w1=case.w1.to(torch.bfloat16), w2=case.w2.to(torch.bfloat16))
    rounded.check(call(case, packed=packed))
