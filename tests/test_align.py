"""moe_align_block_size: the worked case, exact grids against a naive loop, and refusals."""

from __future__ import annotations

import itertools

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import STRIDES, generator, route, seeds, strided

from moe_cpu import moe_align_block_size
from moe_cpu.align import _align_in_torch
from moe_cpu.align_ops import aligned_length
from moe_cpu.errors import ArgumentError, ExpertIdError, MoEError

pytestmark = pytest.mark.sanitize


def check(ids, block, experts, expert_map=None, pad=False):
    got = moe_align_block_size(ids, block, experts, expert_map, pad)
    positions, owners, used = oracle.align(ids, block, experts, expert_map, pad)
    assert [t.dtype for t in got] == [torch.int32] * 3
    assert [tuple(t.shape) for t in got] == [positions.shape, owners.shape, (1,)]
    np.testing.assert_array_equal(got[0].numpy(), positions)
    np.testing.assert_array_equal(got[1].numpy(), owners)
    assert int(got[2]) == used
    return got


def test_the_worked_case():
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]])
    positions, owners, used = moe_align_block_size(ids, 4, 5)
    assert positions.tolist() == [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12, *[12] * 11]
    assert owners.tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert used.tolist() == [16]


@pytest.mark.parametrize("topk", [1, 2, 16, 32])
@pytest.mark.parametrize("experts", [32, 160, 256, 257])
@pytest.mark.parametrize("tokens", [1, 3, 256, 2256, 4096])
def test_published_grid(tokens, experts, topk):
    ids = route(tokens, experts, topk, generator(tokens + topk + experts))
    for block, pad in itertools.product((32, 128), (False, True)):
        check(ids, block, experts, pad=pad)


@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.parametrize("tokens", [16, 32, 2048])
def test_expert_map_of_even_experts(tokens, topk, experts):
    ids = route(tokens, experts, topk, generator(tokens))
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[::2] = torch.arange(experts // 2, dtype=torch.int32)
    _, owners, used = check(ids, 64, experts, expert_map)
    assert (owners[: int(used) // 64] == -1).any()


@given(
    tokens=st.integers(0, 40), topk=st.integers(1, 5), experts=st.integers(1, 20), block=st.integers(1, 17),
    pad=st.booleans(), mapped=st.booleans(), wide=st.booleans(), how=st.sampled_from((None, *STRIDES)), seed=seeds,
)  # fmt: skip
def test_any_small_call(tokens, topk, experts, block, pad, mapped, wide, how, seed):
    rng = generator(seed)
    ids = route(tokens, experts, topk, rng, "some_skipped", torch.int64 if wide else torch.int32)
    ids = ids if how is None else strided(ids, how)
    expert_map = torch.randint(-1, experts, (experts,), generator=rng, dtype=torch.int32) if mapped else None
    check(ids, block, experts, expert_map, pad)
    # The plain-torch form is the same function.
    want = moe_align_block_size(ids, block, experts, expert_map, pad)
    length = aligned_length(ids.numel(), block, experts, pad)
    for mine, theirs in zip(_align_in_torch(ids, block, experts, expert_map, length), want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("experts", [1, 512, 1024, 5000])
def test_any_number_of_experts(experts):
    check(torch.randint(experts, (700, 3), generator=generator(experts), dtype=torch.int32), 16, experts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16])
def test_threads_change_nothing(threads, dtype, set_threads):
    """Enough ids for every thread to get a share of the sort."""
    ids = torch.randint(-1, 61, (40_000, 4), generator=generator(5), dtype=dtype)
    set_threads(threads)
    check(ids, 64, 61)


def test_runs_are_stable_and_repeatable():
    ids = torch.randint(32, (128, 2), generator=generator(6), dtype=torch.int32)
    results = [check(ids, 64, 32)[0] for _ in range(5)]
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_sort(shape):
    check(torch.empty(shape, dtype=torch.int32), 16, 4)


def test_all_on_one_expert_and_all_skipped():
    check(torch.full((50, 2), 3, dtype=torch.int32), 16, 8)
    _, _, used = check(torch.full((50, 2), -1, dtype=torch.int32), 16, 8)
    assert int(used) == 0


@pytest.mark.parametrize("bad", [-2, 8, 15, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("mapped", [False, True])
def test_an_id_out_of_range_is_named(bad, dtype, mapped):
    ids = torch.zeros((300, 4), dtype=dtype)
    ids[257, 2] = bad
    expert_map = torch.arange(8, dtype=torch.int32) if mapped else None
    with pytest.raises(ExpertIdError, match=rf"topk_ids\[257, 2\].*\[0, 8\).*got {bad}"):
        moe_align_block_size(ids, 16, 8, expert_map)


def test_a_64_bit_id_is_not_cut_to_32_bits():
    ids = torch.tensor([[2**32 + 1]])
    with pytest.raises(ExpertIdError, match=str(2**32 + 1)):
        moe_align_block_size(ids, 4, 8)


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_of_several_bad_ids_is_named(threads, set_threads):
    set_threads(threads)
    ids = torch.zeros((50_000, 2), dtype=torch.int32)
    ids[20_000, 1], ids[40_000, 0] = 99, 98
    with pytest.raises(ExpertIdError, match=r"\[20000, 1\].*got 99"):
        moe_align_block_size(ids, 16, 8)


IDS = torch.zeros((2, 2), dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((IDS[0], 4, 8), ValueError, r"topk_ids.*\[M, topk\].*\[2\]"),
        ((IDS.float(), 4, 8), TypeError, "topk_ids.*int32 or int64.*fp32"),
        ((IDS.short(), 4, 8), TypeError, "topk_ids.*int16"),
        ((IDS.tolist(), 4, 8), ArgumentError, "topk_ids.*a tensor, got list"),
        ((IDS, 4.0, 8), ArgumentError, "block_size.*whole number.*got 4.0"),
        ((IDS, 4, "8"), ArgumentError, "num_experts.*whole number.*got '8'"),
        ((IDS, 4, 8, list(range(8))), ArgumentError, "expert_map.*a tensor, got list"),
        ((IDS, 4, 2, torch.tensor([0, 2**40])), IndexError, rf"expert_map\[1\].*int32.*got {2**40}"),
        ((IDS, 0, 8), ArgumentError, "block_size.*at least 1.*got 0"),
        ((IDS, -3, 8), ArgumentError, "block_size.*got -3"),
        ((IDS, 4, 0), ArgumentError, "num_experts.*got 0"),
        (
            (IDS, 4, 8, torch.zeros(7, dtype=torch.int32)),
            ValueError,
            r"expert_map.*\[num_experts\] = \[8\].*\[7\]",
        ),
        ((IDS, 4, 8, torch.zeros(8)), TypeError, "expert_map.*int32.*fp32"),
    ],
)
def test_refusals(arguments, kind, message):
    with pytest.raises(kind, match=message) as refused:
        moe_align_block_size(*arguments)
    assert isinstance(refused.value, MoEError)


@pytest.mark.parametrize(("block", "experts"), [(2**30, 3), (2**20, 2**12), (2**31, 1), (2**62, 2**62)])
def test_sizes_past_2_to_31_are_refused_with_the_numbers(block, experts):
    with pytest.raises(ArgumentError, match=r"4 \+ .*does not fit in int32"):
        moe_align_block_size(IDS, block, experts)


def test_ids_past_2_to_31_are_refused_without_being_read():
    ids = torch.zeros((1, 1), dtype=torch.int32).expand(2**16, 2**15)  # one number, seen 2^31 times
    with pytest.raises(ArgumentError, match="2147483648"):
        moe_align_block_size(ids, 1, 1)
