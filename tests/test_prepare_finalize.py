"""The local and the batched first and last stage, on their own."""

from __future__ import annotations

import bounds
import numpy as np
import oracle
import pytest
import torch
from strategies import make_case

from moe_cpu import BatchedPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from moe_cpu.errors import ArgumentError, ExpertIdError, ShapeError

BF16 = torch.bfloat16


def prepare(stage, case, **changes):
    arguments = {
        "a1": case.x, "a1_scale": None, "a2_scale": None, "topk_weights": case.topk_weights, "topk_ids": case.topk_ids,
        "num_experts": case.E, "expert_map": case.expert_map, "apply_router_weight_on_input": case.weight_on_input,
    }  # fmt: skip
    return stage.prepare(**(arguments | changes))


def test_local_prepare_passes_the_tokens_on():
    case = make_case()
    result = prepare(MoEPrepareAndFinalizeNoEP(), case)
    assert result[0] is case.x
    assert result[1:] == (None, None, None, None)


@pytest.mark.parametrize("stage", [MoEPrepareAndFinalizeNoEP(), BatchedPrepareAndFinalize(8, 4)])
def test_weight_on_the_input_needs_one_expert_per_token(stage):
    with pytest.raises(ArgumentError, match=r"topk = 1.*topk = 2"):
        prepare(stage, make_case(topk=2), apply_router_weight_on_input=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_weight_on_the_input_rounds_once(dtype):
    case = make_case(M=50, topk=1, x_dtype=dtype, weight_on_input=True)
    before = case.x.clone()
    a1 = prepare(MoEPrepareAndFinalizeNoEP(), case).a1q
    want = oracle.f64(case.x) * oracle.f64(case.topk_weights)
    error = bounds.rounding(bounds.Worst, want, 2.0**-24 * np.abs(want), bounds.name_of(dtype))
    bounds.assert_within(a1, want, error)
    assert a1.dtype == dtype
    assert torch.equal(case.x, before)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("pair_dtype", [torch.float32, BF16])
def test_local_finalize(on_input, pair_dtype, rng):
    M, topk, K = 300, 1 if on_input else 3, 1000  # more than one chunk of rows
    pairs = torch.randn((M, topk, K), generator=rng).to(pair_dtype)
    weights, ids = torch.rand((M, topk), generator=rng), torch.zeros((M, topk), dtype=torch.int32)
    ids[5, 0], pairs[5, 0] = -1, float("nan")  # a row that nobody wrote
    output = torch.full((M, K), float("nan"), dtype=BF16)
    MoEPrepareAndFinalizeNoEP().finalize(output, pairs, weights, ids, on_input)
    factors = np.ones((M, topk)) if on_input else oracle.f64(weights)
    terms = np.nan_to_num(oracle.f64(pairs)) * factors[..., None]
    error = (topk + 1) * 2.0**-24 * np.abs(terms).sum(axis=1)
    bounds.assert_within(
        output, terms.sum(axis=1), bounds.rounding(bounds.Worst, terms.sum(axis=1), error, "bfloat16")
    )


def test_local_finalize_takes_a_reduced_result():
    stage, output = MoEPrepareAndFinalizeNoEP(), torch.zeros((4, 6), dtype=BF16)
    assert stage.accepts_reduced()
    reduced = torch.arange(24.0).view(4, 6)
    weights, ids = torch.ones(4, 2), torch.zeros((4, 2), dtype=torch.int32)
    stage.finalize(output, reduced, weights, ids, False)
    assert torch.equal(output.float(), reduced)
    stage.finalize(output, output, weights, ids, False)
    assert torch.equal(output.float(), reduced)


def test_finalize_refuses_a_result_of_another_shape():
    output, weights, ids = torch.zeros(4, 6), torch.ones(4, 2), torch.zeros((4, 2), dtype=torch.int32)
    with pytest.raises(ShapeError, match=r"\[M, topk, K\] = \[4, 2, 6\].*\[4, 3, 6\]"):
        MoEPrepareAndFinalizeNoEP().finalize(output, torch.zeros(4, 3, 6), weights, ids, False)
    with pytest.raises(ShapeError, match=r"\[2, 5, 6\].*\[2, 4, 6\]"):
        BatchedPrepareAndFinalize(5, 2).finalize(output, torch.zeros(2, 4, 6), weights, ids, False)


@pytest.mark.parametrize("stage", [MoEPrepareAndFinalizeNoEP(), BatchedPrepareAndFinalize(8, 4)])
def test_scales_are_refused_by_name(stage):
    with pytest.raises(ArgumentError, match="a1_scale"):
        prepare(stage, make_case(), a1_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="a2_scale"):
        prepare(stage, make_case(), a2_scale=torch.ones(1))


def test_what_the_stages_say_of_themselves():
    local, batched = MoEPrepareAndFinalizeNoEP(), BatchedPrepareAndFinalize(7, 3)
    assert (local.topk_indices_dtype(), local.max_num_tokens_per_rank()) == (None, None)
    assert (batched.topk_indices_dtype(), batched.max_num_tokens_per_rank()) == (None, 7)
    assert not batched.accepts_reduced()


@pytest.mark.parametrize("local", [None, 3])
def test_batched_prepare_puts_each_experts_tokens_in_order(local):
    case = make_case(M=9, K=8, I=4, E=5, topk=2, routing="some_skipped", local=local, seed=71)
    E = local or 5
    batch, scale, counts, ids, weights = prepare(BatchedPrepareAndFinalize(20, E), case)
    local_ids = oracle.local_ids(case.topk_ids, case.expert_map)
    assert (scale, weights) == (None, None)
    assert batch.shape == (E, 20, 8)
    np.testing.assert_array_equal(ids.numpy(), local_ids)
    for e in range(E):
        tokens = np.nonzero(local_ids == e)[0]
        assert int(counts[e]) == tokens.size
        assert torch.equal(batch[e, : tokens.size], case.x[torch.from_numpy(tokens)])


def test_batched_prepare_names_the_expert_that_overflows():
    case = make_case(M=9, E=3, topk=1, routing="one_expert")
    expert = int(case.topk_ids[0, 0])
    with pytest.raises(ArgumentError, match=rf"max_num_tokens.*at least 9.*expert {expert}.*8"):
        prepare(BatchedPrepareAndFinalize(8, 3), case)


@pytest.mark.parametrize(("value", "mapped"), [(3, False), (-2, False), (9, True)])
def test_batched_prepare_refuses_ids_out_of_range(value, mapped):
    case = make_case(M=4, E=3)
    ids = case.topk_ids.clone()
    ids[2, 1] = value
    expert_map = torch.arange(3, dtype=torch.int32) if mapped else None
    with pytest.raises(ExpertIdError, match=rf"\[2, 1\].*got {value}"):
        prepare(BatchedPrepareAndFinalize(20, 3), case, topk_ids=ids, expert_map=expert_map)


@pytest.mark.parametrize("arguments", [(-1, 3), (4, -2)])
def test_batched_refuses_negative_sizes(arguments):
    with pytest.raises(ArgumentError, match=f"got {min(arguments)}"):
        BatchedPrepareAndFinalize(*arguments)
