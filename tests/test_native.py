"""Every instruction set on the same cases, from the same packed buffer, against float64."""

from __future__ import annotations

import time

import bounds
import numpy as np
import oracle
import pytest
import torch
from bounds import Typical, assert_within
from calls import native, native_pairs, pack
from hypothesis import given
from strategies import STRIDES, Case, cases, make_case, strided

from moe_cpu import machine, ops

pytestmark = pytest.mark.sanitize


@given(case=cases())
def test_any_small_call(isa, case):
    case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_random_data(isa, activation, bias):
    """Worst-case bound, its sqrt(k) form, and the relative error that bf16 at two places leaves."""
    case = make_case(M=37, K=320, I=160, E=5, topk=3, activation=activation, bias=bias, seed=11)
    got, want = native(case, isa), case.want()
    case.check(got, isa=isa)
    assert_within(got, want, bounds.DEVIATIONS * case.bound(Typical), case=case, isa=isa, form="sqrt(k)")
    assert bounds.relative_rms(got, want) <= bounds.RELATIVE_RMS


def test_one_token_errs_by_its_two_roundings(isa):
    """How much that is depends on the token; exact arithmetic that rounds where bf16 has to be errs as much."""

    def rounded(exact: np.ndarray) -> np.ndarray:
        return oracle.f64(torch.from_numpy(exact).to(torch.bfloat16))

    case = make_case(M=1, K=1024, I=256, E=8, topk=8, seed=13)
    h = [rounded(oracle.activate(oracle.f64(case.x) @ oracle.f64(w1).T, "silu")) for w1 in case.w1]
    pairs = [
        oracle.f64(w) * (h[e] @ oracle.f64(case.w2[e]).T)
        for w, e in zip(case.topk_weights[0], case.topk_ids[0], strict=True)
    ]
    least = bounds.relative_rms(rounded(sum(pairs)), case.want())
    assert 0 < bounds.relative_rms(native(case, isa), case.want()) <= 1.02 * least


@pytest.mark.parametrize(
    "shape",
    [
        {
            "M": 300,
            "K": 96,
            "I": 64,
            "E": 3,
            "topk": 1,
            "routing": "one_expert",
        },  # more rows than one task takes
        {"M": 256, "K": 4096, "I": 32, "E": 1, "topk": 1},  # rows that do not fit in L2: several blocks of k
        {"M": 2, "K": 64, "I": 4160, "E": 2, "topk": 2},  # a long second product
        {"M": 70, "K": 2056, "I": 40, "E": 4, "topk": 4},  # wider than one weighted-sum task
        {"M": 3, "K": 33, "I": 17, "E": 64, "topk": 8},  # most experts without tokens
        {"M": 1, "K": 288, "I": 144, "E": 8, "topk": 8},  # one token, every expert
    ],
)
def test_where_the_loops_are_cut(isa, shape):
    case = make_case(**shape, seed=12)
    case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("rows", [*range(1, 20), 31, 32, 33, 47, 48, 49])
def test_every_number_of_rows_of_one_expert(isa, rows):
    case = make_case(M=rows, K=40, I=24, E=1, topk=1, seed=rows)
    case.check(native(case, isa), isa=isa)


@given(case=cases())
def test_pairs_unreduced(isa, case):
    case = case.with_(weight_on_input=False)
    got = native_pairs(case.with_(x=case.x.contiguous()), isa)
    want, error = bounds.pair_errors(
        **case.pair_arguments(), numerics=case.numerics(pair=bounds.name_of(case.x.dtype))
    )
    assert_within(got, want, error, case=case, isa=isa)
    absent = torch.from_numpy(oracle.local_ids(case.topk_ids, case.expert_map) < 0)
    assert not got[absent].any(), "a pair without an expert reads exactly zero"


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [5, 5, 5], [1, 0, 0]])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
def test_batched(isa, counts, x_dtype):
    case = make_case(M=15, K=72, I=40, E=3, bias=True, x_dtype=x_dtype)
    x = case.x.view(3, 5, 72).clone()
    for e, n in enumerate(counts):
        x[e, n:] = float("nan")
    out = torch.full_like(x, 7.0)
    got = ops.experts_batched(
        x, pack(case), torch.tensor(counts, dtype=torch.int32), activation="silu", out=out, isa=isa
    )
    assert got is out
    ids = torch.arange(3).repeat_interleave(5).unsqueeze(1)
    pairs = case.with_(topk_ids=ids)
    want, error = bounds.pair_errors(
        **pairs.pair_arguments(), numerics=case.numerics(pair=bounds.name_of(x_dtype))
    )
    for e, n in enumerate(counts):
        rows = slice(5 * e, 5 * e + n)
        assert_within(got[e, :n], want[rows, 0], error[rows, 0], expert=e, isa=isa)
        assert bool((got[e, n:] == 7).all()), "rows past the count are not written"


@pytest.mark.parametrize("name", ["x", "topk_ids", "topk_weights"])
@pytest.mark.parametrize("how", STRIDES)
def test_strides_change_nothing(isa, name, how):
    case = make_case(M=9, K=70, I=33, E=4, topk=2, seed=13)
    want = native(case, isa)
    assert torch.equal(native(case.with_(**{name: strided(getattr(case, name), how)}), isa), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weight_dtypes(isa, dtype):
    case = make_case(M=6, weights_dtype=dtype, seed=14)
    case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(isa, value):
    case = make_case(M=20, K=64, I=32, E=2, topk=2, seed=15)
    clean = native(case, isa)
    x = case.x.clone()
    x[7, 3] = value
    got = native(case.with_(x=x), isa)
    assert not torch.isfinite(got[7]).any()
    others = torch.arange(20) != 7
    assert torch.equal(got[others], clean[others])


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("inner", [1, 17, 40])
def test_an_infinity_is_not_multiplied_by_padding(isa, activation, inner):
    """Zeros that only fill a panel up make no number of it: with positive weights an infinite token has infinite results."""
    case = make_case(M=3, K=33, I=inner, E=2, topk=1, activation=activation, seed=21)
    case = case.with_(x=case.x.clone(), w1=case.w1.abs(), w2=case.w2.abs())
    case.x[1, 2] = float("inf")
    got = native(case, isa)
    assert got[1].isinf().all()
    assert torch.isfinite(got[[0, 2]]).all()


def test_gelu_of_minus_infinity_is_no_number(isa):
    """As in float64, where it is minus infinity times zero; far from there it is zero, whatever it is multiplied by."""
    case = make_case(M=2, K=8, I=4, E=1, topk=1, activation="gelu", seed=22)
    case.x.zero_()[:, 0] = torch.tensor([float("-inf"), -300.0])
    case.w1.zero_()[:, :4, 0], case.w1[:, 4:, 0] = 1, 1e35
    got = native(case, isa)
    assert got[0].isnan().all()
    assert not got[1].any()


def test_no_kernel_is_faster_than_its_ceiling(isa, set_threads):
    """A probe whose sums leave the registers measures the stack, and every share of the limit is wrong. Other processes take their turns: hence the tries.

    Both rates are the best of stretches of at least a hundredth of a second, the probe's own shortest.
    """
    if isa == "amx_emulated":
        pytest.skip("nobody measures an emulation")
    set_threads(1)
    case = make_case(M=240, K=1024, I=512, E=1, topk=1, seed=23)
    packed, ceiling, reached = pack(case), 0.0, 0.0
    for tries in range(60):
        ceiling = max(ceiling, machine.probe_matrix_peak(isa, 1, 0.05))
        start, took, flops = time.perf_counter(), 0.0, 0
        while took < 0.01:
            native(case, isa, packed)
            took, flops = time.perf_counter() - start, flops + 6 * 240 * 1024 * 512
        reached = max(reached, flops / took)
        if tries >= 7 and reached < ceiling:
            break
    assert reached < ceiling


def test_a_nan_weight_of_a_skipped_slot_is_not_used(isa):
    case = make_case(M=4, routing="any", seed=16)
    ids, weights = case.topk_ids.clone(), case.topk_weights.clone()
    ids[2, 1], weights[2, 1] = -1, float("nan")
    case = case.with_(topk_ids=ids, topk_weights=weights)
    case.check(native(case, isa), isa=isa)


def test_nan_of_one_token_in_a_remote_expert_is_dropped(isa):
    case = make_case(M=4, E=4, topk=1, local=2, seed=17)
    remote = int((case.expert_map < 0).nonzero()[0])
    here = int((case.expert_map >= 0).nonzero()[0])
    x, ids = case.x.clone(), torch.full_like(case.topk_ids, here)
    x[1], ids[1] = float("nan"), remote
    got = native(case.with_(x=x, topk_ids=ids), isa)
    assert not got[1].any()
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("where", ["x", "w1", "w2", "all"])
def test_subnormals(isa, where):
    case = make_case(M=5, K=64, I=32, E=2, topk=2, seed=18)
    changes = {
        n: (getattr(case, n) * 2.0**-130).contiguous() for n in ("x", "w1", "w2") if where in (n, "all")
    }
    case = case.with_(**changes)
    assert any((getattr(case, n).double().abs() < bounds.TINY).any() for n in changes)
    case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**30])
def test_large_and_small_magnitudes(isa, scale):
    case = make_case(M=5, K=64, I=32, E=2, topk=2, seed=19)
    case = case.with_(w2=case.w2 * scale, topk_weights=case.topk_weights * scale)
    case.check(native(case, isa), isa=isa)


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
def test_activations_over_their_whole_range(isa, activation):
    """One-column products, so that the activation is what is measured: gates from -90 to 90."""
    gate = torch.linspace(-90, 90, 721).to(torch.bfloat16).unsqueeze(1)
    w1 = torch.tensor([[[1.0]]] if activation == "relu2" else [[[1.0], [0.0]]], dtype=torch.bfloat16)
    bias = None if activation == "relu2" else torch.tensor([[0.0, 1.5]])
    M = gate.shape[0]
    ids, weights = torch.zeros((M, 1), dtype=torch.int32), torch.ones((M, 1))
    case = Case(gate, w1, torch.ones((1, 1, 1), dtype=torch.bfloat16), weights, ids, activation, bias)
    case.check(native(case, isa), isa=isa)
    tail = native(case, isa)[:40]  # the far left, where all of them vanish
    assert bool((tail.abs() < 1e-20).all())


def test_inputs_are_not_modified(isa):
    case = make_case(M=8, topk=1, weight_on_input=True, local=2, E=4, seed=20)
    packed = pack(case)
    held = {"packed w1": packed.w1, "packed w2": packed.w2}
    held |= {name: value for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    before = {name: value.clone() for name, value in held.items()}
    native(case, isa, packed)
    for name, value in held.items():
        assert torch.equal(value, before[name]), name


def test_output_is_linear_in_the_weights(isa):
    case = make_case(M=12, K=96, I=64, E=4, topk=3, seed=21)
    packed = pack(case)
    once = native(case, isa, packed)
    assert torch.equal(native(case.with_(topk_weights=case.topk_weights * 4), isa, packed), once * 4)
    parts = np.zeros(once.shape)
    for slot in range(3):
        keep = torch.zeros_like(case.topk_weights)
        keep[:, slot] = case.topk_weights[:, slot]
        parts = parts + oracle.f64(native(case.with_(topk_weights=keep), isa, packed))
    # Four roundings to bf16 apart: the sum's and one of each part.
    assert_within(once, parts, 4 * case.bound(), isa=isa)
