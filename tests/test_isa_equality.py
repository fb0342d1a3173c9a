"""What must agree bit for bit: AMX and its emulation, a token in any batch, any number of threads."""

from __future__ import annotations

import oracle
import pytest
import torch
from calls import native, native_pairs, pack
from hypothesis import given
from strategies import cases, make_case

from moe_cpu import isa as selection

SHAPES = [
    {"M": 1, "K": 64, "I": 32, "E": 2, "topk": 1},
    {"M": 33, "K": 97, "I": 65, "E": 3, "topk": 2},
    {"M": 130, "K": 512, "I": 96, "E": 2, "topk": 2},
    {"M": 256, "K": 4096, "I": 32, "E": 1, "topk": 1},
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_amx_is_its_emulation(amx, shape, activation):
    case = make_case(**shape, activation=activation, bias=True, seed=31)
    packed = pack(case)
    assert torch.equal(native(case, "amx", packed), native(case, "amx_emulated", packed))


@given(case=cases())
def test_amx_is_its_emulation_on_any_call(amx, case):
    packed = pack(case)
    assert torch.equal(native(case, "amx", packed), native(case, "amx_emulated", packed))


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-130, 2.0**-133, 2.0**-60])
def test_amx_is_its_emulation_on_subnormals(amx, scale):
    """Tiny operands, and products that are tiny although their operands are not."""
    case = make_case(M=17, K=64, I=32, E=2, topk=2, seed=32)
    x = (case.x.double() * scale).to(torch.bfloat16)
    w1 = (case.w1.double() * 2.0**-70).to(torch.bfloat16) if scale == 2.0**-60 else case.w1
    case = case.with_(x=x, w1=w1)
    packed = pack(case)
    for activation in ("silu", "relu2"):
        if activation == "relu2":
            case = case.with_(activation="relu2", w1=case.w1[:, :32])
            packed = pack(case)
        assert torch.equal(native(case, "amx", packed), native(case, "amx_emulated", packed))


@given(case=cases(tokens=(2, 7, 16, 33)))
def test_splitting_the_batch_changes_no_bit(isa, case):
    packed = pack(case)
    whole = native(case, isa, packed)
    for cut in (1, case.M // 2):
        parts = [
            native(
                case.with_(
                    x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows]
                ),
                isa,
                packed,
            )
            for rows in (slice(0, cut), slice(cut, None))
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_a_token_alone_has_the_bits_it_has_in_a_large_batch(isa):
    case = make_case(M=300, K=544, I=96, E=2, topk=2, bias=True, seed=33)
    packed = pack(case)
    whole = native(case, isa, packed)
    for m in (0, 11, 12, 15, 16, 127, 255, 256, 299):
        rows = slice(m, m + 1)
        one = case.with_(x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])
        assert torch.equal(native(one, isa, packed)[0], whole[m]), m


@given(case=cases(tokens=(2, 7, 17, 33)))
def test_permuting_tokens_permutes_rows(isa, case):
    packed = pack(case)
    order = torch.randperm(case.M, generator=torch.Generator().manual_seed(case.seed))
    moved = case.with_(x=case.x[order], topk_ids=case.topk_ids[order], topk_weights=case.topk_weights[order])
    assert torch.equal(native(moved, isa, packed), native(case, isa, packed)[order])


def test_relabelling_experts_changes_nothing(isa, rng):
    case = make_case(M=21, K=80, I=48, E=5, topk=3, bias=True, seed=34)
    order = torch.randperm(5, generator=rng)  # new label e is old expert order[e]
    label = torch.empty_like(order)
    label[order] = torch.arange(5)
    moved = case.with_(
        w1=case.w1[order],
        w2=case.w2[order],
        w1_bias=case.w1_bias[order],
        w2_bias=case.w2_bias[order],
        topk_ids=label[case.topk_ids.long()].int(),
    )
    assert torch.equal(native(moved, isa), native(case, isa))


def test_no_expert_is_the_slot_left_out(isa):
    case = make_case(M=13, E=4, topk=3, seed=35)
    packed = pack(case)
    ids = case.topk_ids.clone()
    ids[:, 1] = -1
    shorter = case.with_(topk_ids=case.topk_ids[:, [0, 2]], topk_weights=case.topk_weights[:, [0, 2]])
    assert torch.equal(native(case.with_(topk_ids=ids), isa, packed), native(shorter, isa, packed))


@pytest.mark.parametrize("shape", [*SHAPES, {"M": 90, "K": 160, "I": 96, "E": 16, "topk": 4}])
def test_any_number_of_threads_gives_the_same_bits(isa, shape, set_threads):
    case = make_case(**shape, seed=36)
    packed = pack(case)
    results, pairs = [], []
    for threads in (1, 2, 3, 7, 16):
        set_threads(threads)
        results.append(native(case, isa, packed))
        pairs.append(native_pairs(case, isa, packed))
    for result, pair in zip(results[1:], pairs[1:], strict=True):
        assert torch.equal(result, results[0])
        assert torch.equal(pair, pairs[0])


def test_a_second_run_gives_the_same_bits(isa):
    case = make_case(M=64, K=256, I=96, E=8, topk=4, seed=37)
    packed = pack(case)
    first = native(case, isa, packed)
    for _ in range(5):
        assert torch.equal(native(case, isa, packed), first)


def test_emulation_is_never_chosen_by_itself():
    if set(selection.available()) - {"amx_emulated"}:
        assert selection.active() != "amx_emulated"
