"""Refusals: the right class, the argument's name, the expected and the given numbers, the fix, and no native code before them."""

from __future__ import annotations

import pickle

import pytest
import torch
from calls import call, pack, require
from strategies import make_case

from moe_cpu import PackedExperts, errors, fused_experts, native_library, pack_ops

SIZES = {"M": 5, "K": 64, "I": 48, "E": 4, "topk": 2}
CASE = make_case(**SIZES, bias=True)
BF16 = torch.bfloat16

REFUSALS = [
    ({"x": CASE.x[:, :60]}, errors.ShapeError, r"hidden_states.*\[M, K\] = \[5, 64\].*\[5, 60\]"),
    ({"x": CASE.x[None]}, errors.ShapeError, r"hidden_states.*\[M, K\].*\[1, 5, 64\].*view"),
    ({"x": CASE.x[:4]}, errors.ShapeError, r"topk_ids.*\[M, topk\].*4.*\[5, 2\]"),
    ({"x": CASE.x.int()}, errors.DTypeError, r"hidden_states.*int32"),
    ({"x": CASE.x.double()}, errors.DTypeError, r"hidden_states.*fp64"),
    ({"x": CASE.x.to("meta")}, errors.DeviceError, r"(w1|topk_ids).*meta"),
    ({"topk_ids": CASE.topk_ids.float()}, errors.DTypeError, r"topk_ids.*int32 or int64.*fp32.*\.to\("),
    ({"topk_ids": CASE.topk_ids.short()}, errors.DTypeError, r"topk_ids.*int16"),
    ({"topk_ids": CASE.topk_ids[:, 0]}, errors.ShapeError, r"topk_ids.*\[M, topk\].*\[5\]"),
    (
        {"topk_ids": CASE.topk_ids[:, :1]},
        errors.ShapeError,
        r"topk_weights.*\[M, topk\] = \[5, 1\].*\[5, 2\]",
    ),
    ({"topk_weights": CASE.topk_weights[:3]}, errors.ShapeError, r"topk_weights.*\[5, 2\].*\[3, 2\]"),
    ({"topk_weights": CASE.topk_weights.int()}, errors.DTypeError, r"topk_weights.*int32"),
    ({"activation": "mish"}, errors.ArgumentError, r"activation.*silu.*relu2.*'mish'"),
    ({"weight_on_input": True}, errors.ArgumentError, r"apply_router_weight_on_input.*topk = 1.*topk = 2"),
    ({"expert_map": torch.zeros((4, 1), dtype=torch.int32)}, errors.ShapeError, r"expert_map.*\[4, 1\]"),
    ({"expert_map": torch.zeros(4)}, errors.DTypeError, r"expert_map.*int32.*fp32"),
]
DENSE_REFUSALS = [
    ({"w1": CASE.w1.transpose(1, 2)}, errors.ShapeError, r"w1.*\[E, N, K\] = \[4, 96, 64\] bf16, got \[4, 64, 96\]; pass w1\.transpose\(1, 2\)"),
    ({"w1": CASE.w2, "w2": CASE.w1}, errors.ShapeError, r"w1.*\[4, 96, 64\] bf16, got \[4, 64, 48\]; swap w1 and w2"),
    ({"w2": CASE.w2.transpose(1, 2)}, errors.ShapeError, r"w2.*\[4, 64, 48\].*\[4, 48, 64\].*w2\.transpose\(1, 2\)"),
    ({"w1": CASE.w1[0]}, errors.ShapeError, r"w1.*\[E, N, K\].*\[96, 64\]"),
    ({"w2": CASE.w2[:3]}, errors.ShapeError, r"w2.*\[4, 64, 48\].*\[3, 64, 48\]"),
    ({"w2": CASE.w2[:, :, :40]}, errors.ShapeError, r"w2.*\[4, 64, 48\].*\[4, 64, 40\].*gated"),
    ({"activation": "relu2"}, errors.ShapeError, r"w2.*\[4, 64, 96\].*\[4, 64, 48\].*not gated"),
    ({"w2": CASE.w2.float()}, errors.DTypeError, r"w2.*bf16.*w1.*fp32"),
    ({"w1": CASE.w1.int(), "w2": CASE.w2.int()}, errors.DTypeError, r"w1.*int32"),
    ({"w1": CASE.w1.tolist()}, errors.ArgumentError, r"w1.*tensor.*list"),
    ({"w2": None}, errors.ArgumentError, r"w2.*tensor.*None"),
    ({"w1_bias": CASE.w1_bias[:, :95]}, errors.ShapeError, r"w1_bias.*\[E, N\] = \[4, 96\].*\[4, 95\]"),
    ({"w2_bias": CASE.w2_bias[:3]}, errors.ShapeError, r"w2_bias.*\[E, K\] = \[4, 64\].*\[3, 64\]"),
    ({"w1_bias": CASE.w1_bias.long()}, errors.DTypeError, r"w1_bias.*int64"),
]  # fmt: skip


@pytest.mark.usefixtures("native")
def test_packed_weights_bring_both():
    with pytest.raises(
        errors.ArgumentError, match=r"w2: expected None beside a PackedExperts.*\(x, experts, None,"
    ):
        fused_experts(CASE.x, pack(CASE), CASE.w2, CASE.topk_weights, CASE.topk_ids)
    with pytest.raises(errors.ShapeError, match="swap w1 and w2"):
        PackedExperts.pack(CASE.w2, CASE.w1)


@pytest.fixture
def no_native_call(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("native code was reached")

    monkeypatch.setattr(native_library, "library", refuse)
    monkeypatch.setattr(pack_ops, "pack_expert", refuse)


@pytest.mark.parametrize("backend", ["auto", "native", "reference"])
@pytest.mark.parametrize(("changes", "kind", "message"), REFUSALS + DENSE_REFUSALS)
def test_dense(no_native_call, backend, changes, kind, message):
    with pytest.raises(kind, match=message):
        call(CASE.with_(**changes), backend=backend)


@pytest.mark.parametrize(("changes", "kind", "message"), REFUSALS)
def test_packed(monkeypatch, request, changes, kind, message):
    packed = pack(CASE)
    request.getfixturevalue("no_native_call")
    with pytest.raises(kind, match=message):
        call(CASE.with_(**changes), packed=packed)


def test_packed_with_what_does_not_go_with_it():
    packed = pack(CASE)
    arguments = (CASE.x, packed, None, CASE.topk_weights, CASE.topk_ids)
    with pytest.raises(errors.ArgumentError, match=r"w1_bias.*packed weights carry.*pack"):
        fused_experts(*arguments, w1_bias=CASE.w1_bias)
    with pytest.raises(
        errors.ArgumentError, match=r"'relu2' is not gated.*'concatenated'.*activation='relu2'"
    ):
        fused_experts(*arguments, activation="relu2")
    with pytest.raises(errors.MoEError, match="w2"):
        fused_experts(CASE.x, packed, CASE.w2, CASE.topk_weights, CASE.topk_ids)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_number_of_experts(backend):
    with pytest.raises(errors.ArgumentError, match=r"global_num_experts.*E = 4.*got 8.*expert_map"):
        call(CASE, backend=backend, global_num_experts=8)
    case = CASE.with_(expert_map=torch.arange(4, dtype=torch.int32))
    with pytest.raises(errors.ShapeError, match=r"expert_map.*\[global_num_experts\] = \[8\].*\[4\]"):
        call(case, backend=backend, global_num_experts=8)


@pytest.mark.parametrize("backend", ["native", "onednn", "reference"])
@pytest.mark.parametrize("value", [4, 1000, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_expert_id_out_of_range_has_position_value_and_range(backend, value, dtype):
    require(backend)
    ids = CASE.topk_ids.to(dtype)
    ids[3, 1] = value
    with pytest.raises(errors.ExpertIdError, match=rf"topk_ids\[3, 1\].*\[0, 4\).*got {value}\b"):
        call(CASE.with_(topk_ids=ids), backend=backend)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_the_range_of_ids_is_the_maps(backend):
    case = make_case(E=6, local=3, seed=101)
    ids = case.topk_ids.clone()
    ids[0, 0] = 6
    with pytest.raises(errors.ExpertIdError, match=r"topk_ids\[0, 0\].*\[0, 6\).*got 6"):
        call(case.with_(topk_ids=ids), backend=backend)
    wide = case.topk_ids.long()
    wide[0, 0] = 2**32  # its lower half is a valid id
    with pytest.raises(errors.ExpertIdError, match=str(2**32)):
        call(case.with_(topk_ids=wide), backend=backend)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("value", [3, -2])
def test_a_map_entry_out_of_range_is_named(backend, value):
    case = make_case(E=6, local=3, topk=6, seed=102)
    expert_map = case.expert_map.clone()
    expert_map[5] = value
    with pytest.raises(errors.ExpertIdError, match=rf"expert_map\[5\].*\[0, .*3\).*got {value}"):
        call(case.with_(expert_map=expert_map), backend=backend)


def test_after_an_error_the_next_call_is_right():
    case = make_case(seed=103)
    packed = pack(case)
    bad = case.topk_ids.clone()
    bad[-1, -1] = 99
    for _ in range(3):
        with pytest.raises(errors.ExpertIdError):
            call(case.with_(topk_ids=bad), packed=packed)
        case.check(call(case, packed=packed))


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.ShapeError, ValueError), (errors.DTypeError, TypeError), (errors.DeviceError, ValueError),
        (errors.ArgumentError, ValueError), (errors.ExpertIdError, IndexError), (errors.ExpertIdError, ValueError),
        (errors.BackendUnavailable, RuntimeError), (errors.IsaUnavailable, errors.BackendUnavailable),
        (errors.NativeLibraryMissing, errors.BackendUnavailable), (errors.OutOfMemory, MemoryError),
        (errors.NoBackward, RuntimeError),
    ],
)  # fmt: skip
def test_errors_are_also_the_classes_a_caller_expects(kind, builtin):
    assert issubclass(kind, errors.MoEError)
    assert issubclass(kind, builtin)
    assert str(pickle.loads(pickle.dumps(kind("a message")))) == "a message"


def test_pack_names_what_it_got():
    with pytest.raises(errors.DTypeError, match="w2"):
        PackedExperts.pack(CASE.w1, CASE.w2.float())
