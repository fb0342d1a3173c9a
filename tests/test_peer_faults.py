"""Faults that implementations of this layer are known for, one test each."""

from __future__ import annotations

import bounds
import numpy as np
import oracle
import pytest
import torch
from calls import call, native, native_pairs, pack, require
from strategies import Case, make_case, strided

from moe_cpu import PackedExperts, fused_experts, ops, pack_ops
from moe_cpu import isa as selection
from moe_cpu.errors import ExpertIdError, IsaUnavailable
from moe_cpu.experts import create

BF16 = torch.bfloat16


def test_the_expert_map_is_used(isa):
    case = make_case(M=30, E=8, topk=4, local=3, seed=141)
    got = native(case, isa)
    case.check(got, isa=isa)
    lower = case.with_(expert_map=None, topk_ids=case.topk_ids.clamp(max=2))
    assert not torch.equal(got, native(lower, isa)), "a map that changes nothing tests nothing"


def one_expert_of_many(E: int, e: int, M: int = 3) -> tuple[Case, PackedExperts]:
    """A layer of E experts of which only expert e is ever written: the others are address space."""
    case = make_case(M=M, K=1024, I=520, E=1, topk=1, bias=False, seed=142)
    sizes = [
        pack_ops.packed_elements(1040, 1024, "concatenated"),
        pack_ops.packed_elements(1024, 520, "none"),
    ]
    w1, w2 = (torch.empty((E, size), dtype=BF16) for size in sizes)
    pack_ops.pack_expert(case.w1[0], "concatenated", w1[e])
    pack_ops.pack_expert(case.w2[0], "none", w2[e])
    return case, PackedExperts(w1, w2, None, None, K=1024, I=520, gate_layout="concatenated")


def test_weights_of_more_than_2_to_31_elements(isa):
    E = 2100
    case, packed = one_expert_of_many(E, E - 1)
    assert E * packed.N * packed.K > 2**31
    ids = torch.full_like(case.topk_ids, E - 1)
    with selection.use(isa):
        case.check(fused_experts(case.x, packed, None, case.topk_weights, ids), isa=isa)
    pairs = ops.experts_unreduced(case.x, packed, ids, activation="silu", isa=isa)
    want, error = bounds.pair_errors(**case.pair_arguments(), numerics=case.numerics(pair="bfloat16"))
    bounds.assert_within(pairs, want, error, isa=isa)


def long_call(M: int, topk: int) -> tuple[Case, torch.Tensor, torch.Tensor, torch.Tensor]:
    """M tokens of K = 4096 that are all the same row, of which only the first and the last have experts."""
    case = make_case(M=2, K=4096, I=16, E=2, topk=topk, routing="any", seed=143)
    case = case.with_(x=case.x[:1].expand(2, 4096))
    ids = torch.full((M, topk), -1, dtype=torch.int32)
    weights = torch.zeros((M, topk))
    ids[[0, -1]], weights[[0, -1]] = case.topk_ids, case.topk_weights
    return case, case.x[:1].expand(M, 4096), weights, ids


def test_more_than_2_to_31_elements_before_the_sum():
    M, topk = 2**16 + 1, 8
    case, x, weights, ids = long_call(M, topk)
    assert M * topk * 4096 > 2**31
    got = ops.fused_experts(x, pack(case), weights, ids, activation="silu")
    case.check(got[[0, -1]])
    assert not got[1:-1].any()


@pytest.mark.slow
def test_more_than_2_to_31_elements_of_result():
    """4.3 GB of pairs."""
    M, topk = 2**16 + 1, 8
    case, x, _, ids = long_call(M, topk)
    got = ops.experts_unreduced(x, pack(case), ids, activation="silu")
    assert got.numel() > 2**31
    want, error = bounds.pair_errors(**case.pair_arguments(), numerics=case.numerics(pair="bfloat16"))
    bounds.assert_within(got[[0, -1]], want, error)
    assert not got[1:-1].any()


def test_more_than_2_to_31_elements_of_input():
    """Rows of x far apart: a stride of 2^30 elements over 6 GB of address space, of which three rows are real."""
    case = make_case(M=3, seed=144)
    memory = torch.empty(2**31 + case.K, dtype=BF16)
    x = memory.as_strided((3, case.K), (2**30, 1))
    x.copy_(case.x)
    case.check(call(case.with_(x=x), packed=pack(case)))


@pytest.mark.parametrize("M", [1, 4, 40])
def test_no_expert_touches_nothing(isa, M):
    case = make_case(M=M, topk=4, E=4, seed=145)
    packed, guard = pack(case), torch.full((3 * M, case.K), 5.0, dtype=BF16)
    out = guard[M : 2 * M]
    for skipped in range(5):
        ids = case.topk_ids.clone()
        ids[:, :skipped] = -1
        ops.fused_experts(case.x, packed, case.topk_weights, ids, activation="silu", out=out, isa=isa)
        case.with_(topk_ids=ids).check(out, isa=isa)
    assert bool((guard[:M] == 5).all())
    assert bool((guard[2 * M :] == 5).all())


@pytest.mark.parametrize("value", [4, 5, 2**30, -2])
def test_an_id_out_of_range_is_refused_and_not_computed_with(isa, value):
    case = make_case(M=4, E=4, seed=146)
    ids = case.topk_ids.clone()
    ids[3, 0] = value
    out = torch.full_like(case.x, 5)
    with pytest.raises(ExpertIdError, match=rf"\[3, 0\].*{value}"):
        ops.fused_experts(case.x, pack(case), case.topk_weights, ids, activation="silu", out=out, isa=isa)
    assert bool((out == 5).all())


@pytest.mark.parametrize("how", ["columns", "padded", "transposed", "rows"])
def test_strided_routing(isa, how):
    case = make_case(M=17, E=6, topk=3, seed=147)
    moved = case.with_(topk_ids=strided(case.topk_ids, how), topk_weights=strided(case.topk_weights, how))
    case.check(native(moved, isa), isa=isa)


@pytest.mark.parametrize("backend", ["native", "onednn", "reference"])
def test_the_callers_weights_are_left_alone(backend):
    require(backend)
    case = make_case(M=6, topk=1, weight_on_input=True, seed=148)
    before = case.topk_weights.clone()
    call(case, backend=backend)
    assert torch.equal(case.topk_weights, before)


@pytest.mark.parametrize("K", [1, 31, 33, 100, 2879])
@pytest.mark.parametrize("I", [1, 31, 33, 100])
def test_sizes_that_are_no_multiple_of_32(isa, K, I):
    case = make_case(M=5, K=K, I=I, bias=True, seed=K + I)
    case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("name", ["alpha", "limit", "swiglu_limit", "clamp"])
def test_a_parameter_nobody_uses_is_not_accepted(name):
    case = make_case(activation="swigluoai")
    with pytest.raises(TypeError, match=name):
        call(case, **{name: 3.0})


def test_rows_nobody_wrote_are_not_summed(isa):
    case = make_case(M=50, E=6, topk=4, local=2, routing="some_skipped", seed=149)
    packed = pack(case)
    clean, pairs = native(case, isa, packed), native_pairs(case, isa, packed)
    ops._mine.scratch.fill_(0xFF)
    assert torch.equal(native(case, isa, packed), clean)
    ops._mine.scratch.fill_(0xFF)
    assert torch.equal(native_pairs(case, isa, packed), pairs)


def test_weights_loaded_again_are_used():
    case, other = make_case(seed=150), make_case(seed=151)
    layer = torch.nn.Module()
    layer.w1, layer.w2 = (torch.nn.Parameter(w.clone(), requires_grad=False) for w in (case.w1, case.w2))

    def run() -> torch.Tensor:
        return call(case.with_(w1=layer.w1, w2=layer.w2))

    case.check(run())
    layer.load_state_dict({"w1": other.w1, "w2": other.w2})
    case.with_(w1=other.w1, w2=other.w2).check(run())
    layer.load_state_dict({"w1": case.w1, "w2": case.w2}, assign=True)
    case.check(run())


@pytest.mark.parametrize("M", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_the_bias_of_few_tokens_counts(isa, M, activation):
    case = make_case(M=M, activation=activation, bias=True, topk=1, seed=152)
    got = native(case, isa)
    case.check(got, isa=isa)
    for name in ("w1_bias", "w2_bias"):
        with pytest.raises(AssertionError):
            case.with_(**{name: None}).check(got)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_no_tokens_and_every_input_dtype(isa, dtype):
    case = make_case(M=6, x_dtype=dtype, seed=153)
    packed = pack(case)
    case.check(native(case, isa, packed), isa=isa)
    empty = case.with_(x=case.x[:0], topk_ids=case.topk_ids[:0], topk_weights=case.topk_weights[:0])
    assert native(empty, isa, packed).shape == (0, case.K)
    assert native_pairs(empty, isa, packed).shape == (0, 2, case.K)


def test_more_tokens_than_ever_before(isa):
    for M in (1, 3, 200, 2, 700):
        case = make_case(M=M, K=48, I=32, seed=M)
        case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("M", [1, 2, 9])
def test_a_repeated_id_in_one_row(isa, M):
    case = make_case(M=M, E=3, topk=4, routing="one_expert", seed=154)
    case.check(native(case, isa), isa=isa)
    pairs = oracle.f64(native_pairs(case, isa))
    assert np.array_equal(pairs[:, 0], pairs[:, 3])


@pytest.mark.parametrize("number", [-1, 5, 99])
def test_an_instruction_set_that_is_not_there_is_refused_by_the_library(number):
    """Past the name check, with the number itself: no illegal instruction."""
    case = make_case()
    with pytest.raises(IsaUnavailable, match=str(number)):
        ops.fused_experts(case.x, pack(case), case.topk_weights, case.topk_ids, activation="silu", isa=number)


def test_an_all_zero_answer_fails():
    """Tolerances that accept it were found elsewhere."""
    for K in (64, 2048):
        case = make_case(M=4, K=K, I=256, seed=155)
        with pytest.raises(AssertionError, match="outside the bound"):
            case.check(torch.zeros_like(case.x))


def test_a_skewed_batch(isa):
    """One expert with two hundred tokens beside experts with one: each gets the path of its own size, and the same answer."""
    M, E = 215, 16
    ids = torch.zeros((M, 1), dtype=torch.int32)
    ids[200:, 0] = torch.arange(1, E)
    case = make_case(M=M, K=160, I=96, E=E, topk=1, seed=156).with_(topk_ids=ids)
    packed = pack(case)
    got = native(case, isa, packed)
    case.check(got, isa=isa)
    alone = case.with_(x=case.x[200:], topk_ids=ids[200:], topk_weights=case.topk_weights[200:])
    assert torch.equal(native(alone, isa, packed), got[200:])


@pytest.mark.parametrize("backend", ["native", "onednn", "reference"])
def test_no_expert_does_not_read_the_maps_last_entry(backend):
    """map[-1] is a real expert's place: an index that wraps around would compute with it."""
    require(backend)
    case = make_case(M=6, E=4, topk=2, local=2, seed=157)
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    ids = torch.tensor([[3, -1]] * 3 + [[-1, -1]] * 3, dtype=torch.int32)
    case = case.with_(expert_map=expert_map, topk_ids=ids)
    got = call(case, backend=backend)
    case.check(got, {"first": "bfloat16", "pair": "bfloat16"} if backend == "onednn" else None)
    assert not got[3:].any()


@pytest.mark.parametrize("backend", ["native", "onednn", "reference"])
def test_pairs_without_an_expert_are_zero_before_the_sum(backend):
    require(backend)
    case = make_case(M=6, E=4, topk=2, local=2, bias=True, seed=158)
    ids = torch.tensor([[3, -1], [0, 1], [-1, 2]] * 2, dtype=torch.int32)
    case = case.with_(expert_map=torch.tensor([-1, 0, -1, 1], dtype=torch.int32), topk_ids=ids)
    pairs = create(backend).apply(
        case.x, case.w1, case.w2, ids, "silu", 4, case.expert_map, w1_bias=case.w1_bias, w2_bias=case.w2_bias
    )
    here = torch.tensor([[True, False], [False, True], [False, False]] * 2)
    assert not pairs[~here].any()
    assert bool((pairs[here] != 0).any(dim=-1).all())
