"""Routers against float64: choice with ties, weights with a derived error, other people's implementations."""

from __future__ import annotations

import bounds
import numpy as np
import oracle
import pytest
import torch
from strategies import generator

from moe_cpu.errors import ArgumentError, DTypeError, MoEError, ShapeError
from moe_cpu.routers import grouped_topk, sigmoid_top1, softmax_topk

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Logits below are multiples of 1/8 in [-8, 8]: exact in every dtype, often equal, and otherwise far enough apart for float32 scores to differ.
U = 2.0**-24


def logits_with_ties(M, E, dtype, seed=0):
    return (torch.randint(-64, 65, (M, E), generator=generator(seed)).double() / 8).to(dtype)


def check(got, want, E, normalizations=1):
    weights, ids = want
    assert got.topk_ids.dtype == torch.int32
    assert got.topk_weights.dtype == torch.float32
    np.testing.assert_array_equal(got.topk_ids.numpy(), ids)
    # exp of an argument rounded to |8 - -8| u, its own ulps, a sum of E terms of one sign, a division; the same again to normalize.
    error = (16 + 4 + E + 2) * (1 + normalizations) * U * np.abs(weights)
    bounds.assert_within(got.topk_weights, weights, error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("E", "topk"), [(8, 2), (128, 8), (60, 4), (5, 5), (1, 1)])
def test_softmax_topk(dtype, renormalize, E, topk):
    logits = logits_with_ties(200, E, dtype)
    if E > 5:
        assert any(len(set(row)) < E for row in logits.tolist()), "ties are what this is about"
    check(softmax_topk(logits, topk, renormalize), oracle.softmax_topk(logits, topk, renormalize), E)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("E", "topk", "groups", "topk_group"), [(64, 6, 8, 3), (256, 8, 8, 4), (16, 2, 4, 1), (6, 3, 1, 1)]
)
def test_grouped_topk(scoring, renormalize, dtype, E, topk, groups, topk_group):
    logits = logits_with_ties(100, E, dtype, seed=1)
    got = grouped_topk(logits, topk, groups, topk_group, renormalize, scoring, routed_scaling_factor=2.5)
    want = oracle.grouped_topk(logits, topk, groups, topk_group, renormalize, scoring, scale=2.5)
    check(got, want, E, 2)


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_correction_bias_chooses_and_never_weighs(scale):
    E = 32
    # Distinct scores: sums of two rounded scores may tie or turn over in float32 where the exact ones do not.
    order = torch.stack([torch.randperm(E, generator=generator(m)) for m in range(60)])
    logits = order.float() / 8 - 2
    bias = torch.randn(E, generator=generator(2)) * scale
    got = grouped_topk(logits, 4, 4, 2, True, "sigmoid", bias, 1.0)
    check(got, oracle.grouped_topk(logits, 4, 4, 2, True, "sigmoid", bias), E, 2)
    plain = grouped_topk(logits, 4, 4, 2, True, "sigmoid")
    assert (got.topk_ids != plain.topk_ids).any(), "a bias that changes nothing tests nothing"


def test_a_very_negative_bias_still_leaves_the_best_group():
    """All allowed experts rank below zero: an expert of another group must not take their place."""
    logits = torch.zeros((1, 8))
    bias = torch.tensor([-5.0, -5, -5, -5, -9, -9, -9, -9])
    got = grouped_topk(logits, 3, 2, 1, True, "sigmoid", bias)
    assert got.topk_ids.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_top1(dtype):
    logits = logits_with_ties(300, 16, dtype, seed=3)
    check(sigmoid_top1(logits), oracle.sigmoid_top1(logits), 1)


def test_ties_take_the_lowest_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert softmax_topk(logits, 3).topk_ids.tolist() == [[1, 2, 3]]
    assert sigmoid_top1(logits).topk_ids.tolist() == [[1]]
    assert grouped_topk(torch.zeros((1, 8)), 3, 4, 2).topk_ids.tolist() == [[0, 1, 2]]


def test_a_tokens_route_does_not_depend_on_the_batch(set_threads):
    logits = logits_with_ties(500, 64, torch.bfloat16, seed=4)
    whole = softmax_topk(logits, 8)
    set_threads(1)
    for m in (0, 17, 499):
        one = softmax_topk(logits[m : m + 1], 8)
        assert torch.equal(one.topk_ids[0], whole.topk_ids[m])


@pytest.mark.parametrize("extreme", [1e4, -1e4, 88.0, float("-inf")])
def test_extreme_logits_do_not_overflow(extreme):
    logits = torch.zeros((1, 6))
    logits[0, 3] = extreme
    got = softmax_topk(logits, 2)
    assert torch.isfinite(got.topk_weights).all()
    assert torch.allclose(got.topk_weights.sum(), torch.tensor(1.0))
    assert (3 in got.topk_ids.tolist()[0]) == (extreme > 0)


def test_no_tokens():
    for got in (softmax_topk(torch.zeros(0, 8), 2), grouped_topk(torch.zeros(0, 8), 2, 2, 1)):
        assert got.topk_ids.shape == got.topk_weights.shape == (0, 2)


LOGITS = torch.zeros((3, 8))


@pytest.mark.parametrize(
    ("route", "kind", "message"),
    [
        (lambda: softmax_topk(LOGITS[0], 2), ShapeError, r"router_logits.*\[M, E\].*\[8\]"),
        (lambda: softmax_topk(LOGITS.int(), 2), DTypeError, "router_logits.*int32"),
        (lambda: softmax_topk(LOGITS, 0), ArgumentError, "topk.*E = 8.*got 0"),
        (lambda: softmax_topk(LOGITS, 9), ArgumentError, "topk.*E = 8.*got 9"),
        (lambda: grouped_topk(LOGITS, 2, 3, 1), ArgumentError, "num_expert_group.*divisor of E = 8.*got 3"),
        (lambda: grouped_topk(LOGITS, 2, 2, 3), ArgumentError, "topk_group.*2.*got 3"),
        (lambda: grouped_topk(LOGITS, 5, 2, 1), ArgumentError, "topk.*at most 4.*got 5"),
        (lambda: grouped_topk(LOGITS, 2, 2, 1, scoring_func="max"), ArgumentError, "scoring_func.*'max'"),
        (
            lambda: grouped_topk(LOGITS, 2, 2, 1, e_score_correction_bias=torch.zeros(7)),
            ShapeError,
            r"e_score_correction_bias.*\[E\] = \[8\].*\[7\]",
        ),
    ],
)  # fmt: skip
def test_refusals(route, kind, message):
    with pytest.raises(kind, match=message) as refused:
        route()
    assert isinstance(refused.value, MoEError)


def test_like_transformers_mixtral():
    pytest.importorskip("transformers")
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    torch.manual_seed(0)
    router = MixtralTopKRouter(MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(50, 32)
    with torch.no_grad():
        outputs = router(x)
    got = softmax_topk(x @ router.weight.T, 2)
    ids = next(t for t in outputs if not t.is_floating_point())
    weights = next(t for t in outputs if t.is_floating_point() and t.shape == ids.shape)
    assert torch.equal(got.topk_ids.long(), ids)
    torch.testing.assert_close(got.topk_weights, weights, rtol=64 * U, atol=0)
