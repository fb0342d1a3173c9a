"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter (`TRITON_INTERPRET=1 pytest tests/test_triton.py`)."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import bounds
import hypothesis
import oracle
import pytest
import torch
from bounds import assert_within
from calls import modular, poisoned_empty
from hypothesis import given
from strategies import Case, cases, generator, make_case, route

from moe_cpu.experts.triton import TritonExperts
from moe_cpu.experts.triton_launch import TABLE, Launch, Plan, blocks_bound, fitted, plan_for, sorts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def _reason() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if not INTERPRETED and not torch.cuda.is_available():
        return "no CUDA device, and TRITON_INTERPRET=1 is not set"
    return None


@pytest.fixture(autouse=True)
def _triton(request: pytest.FixtureRequest) -> None:
    reason = _reason()
    if reason is not None and "pure" not in request.keywords:
        required = os.environ.get("MOE_CPU_TEST_REQUIRE_TRITON") == "1"
        pytest.fail(f"MOE_CPU_TEST_REQUIRE_TRITON=1: {reason}") if required else pytest.skip(reason)


def moved(case: Case) -> Case:
    return case.with_(
        **{name: value.to(DEVICE) for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    )


def run(case: Case, **options: Any) -> torch.Tensor:
    return modular(moved(case), TritonExperts(**options)).cpu()


def unreduced(case: Case, experts: TritonExperts | None = None, **options: Any) -> torch.Tensor:
    c = moved(case)
    return (experts or TritonExperts()).apply(
        c.x, c.w1, c.w2, c.topk_ids, c.activation, expert_map=c.expert_map, w1_bias=c.w1_bias, w2_bias=c.w2_bias, **options
    )  # fmt: skip


def check_align(ids: torch.Tensor, block: int, experts: int, expert_map: torch.Tensor | None = None) -> None:
    from moe_cpu import align_triton

    on_device = None if expert_map is None else expert_map.to(DEVICE)
    length = ids.numel() + experts * (block - 1)
    positions, of_blocks, used = align_triton.align(ids.to(DEVICE), block, experts, on_device, length)
    known = torch.where((ids >= 0) & (ids < experts), ids, -1)
    want = oracle.align(known, block, experts, expert_map)
    assert positions.tolist() == want[0].tolist()
    assert of_blocks.tolist() == want[1].tolist()
    assert used.tolist() == [want[2]]


def test_align_worked_case():
    check_align(torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]]), 4, 5)


@pytest.mark.parametrize(
    ("M", "E", "topk", "block"),
    [(0, 3, 2, 4), (1, 1, 1, 1), (33, 6, 3, 4), (130, 17, 8, 16), (30, 70, 4, 2)]
    + ([] if INTERPRETED else [(600, 600, 8, 2), (16384, 256, 8, 64), (5000, 1000, 8, 16), (9000, 3, 2, 1)]),
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_align(M, E, topk, block, dtype):
    """Below and above the number of ids that one kernel takes."""
    rng = generator(M)
    check_align(route(M, E, topk, rng, "some_skipped", dtype), block, E)
    check_align(route(M, E, topk, rng, "one_expert", dtype), block, E, torch.arange(E, dtype=torch.int32) - 1)


@pytest.mark.parametrize(("M", "E", "topk", "block"), [(75, 7, 4, 16), (90, 64, 6, 3), (200, 300, 3, 4)])
@pytest.mark.parametrize("parts", [1, 2, 128])
def test_align_in_parts(M, E, topk, block, parts, monkeypatch):
    """Several chunks of ids in a program, and several programs; otherwise reached by more ids than the interpreter should sort."""
    from moe_cpu import align_triton

    monkeypatch.setattr(align_triton, "_ONE_KERNEL", 0)
    monkeypatch.setattr(align_triton, "_PARTS", parts)
    monkeypatch.setattr(align_triton, "_SMALL", (64, 4))
    monkeypatch.setattr(align_triton, "_LARGE", (128, 4))
    align_triton._series_for.cache_clear()
    rng = generator(M)
    check_align(route(M, E, topk, rng, "some_skipped"), block, E)
    check_align(route(M, E, topk, rng, "one_expert"), block, E, torch.arange(E, dtype=torch.int32) - 1)
    align_triton._series_for.cache_clear()


def test_align_leaves_out_ids_out_of_range():
    ids = torch.tensor([[0, 7, 2**32], [3, -5, 1], [2**40 + 1, 4, 3]])
    check_align(ids, 2, 4)


@hypothesis.settings(max_examples=25 if INTERPRETED else 150)
@given(case=cases())
def test_any_small_call(case):
    case.check(run(case))


@pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_random_data(activation, bias):
    case = make_case(M=37, K=320, I=160, E=5, topk=3, activation=activation, bias=bias, seed=11)
    got = run(case)
    case.check(got)
    assert bounds.relative_rms(got, case.want()) <= bounds.RELATIVE_RMS


@pytest.mark.parametrize("shape", [{"M": 3, "routing": "some_skipped"}, {"M": 40}])
def test_fp16(shape):
    case = make_case(**shape, K=80, I=48, x_dtype=torch.float16, w_dtype=torch.float16, seed=4)
    case.check(run(case))


# The interpreter is slow: one token in small blocks, more in large ones, and narrow tiles.
PLANS = [
    pytest.param(M, plan, id=f"{M}-m{plan.m}")
    for _, plan in TABLE
    for M in ((1,) if plan.m == 16 else (9,) if INTERPRETED else (1, 9, 300))
]


@pytest.mark.parametrize(("M", "plan"), PLANS)
@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_every_plan(M, plan, tma, activation):
    """The same answer whatever the launch, with weights through the copy engine or not."""
    narrow = {"n": 32, "k": 32, "stages": 2} if INTERPRETED else {}
    first, second = (replace(launch, tma=tma, **narrow) for launch in (plan.first, plan.second))
    case = make_case(M=M, K=256, I=128, E=3, topk=2, activation=activation, bias=True, seed=M)
    case.check(run(case, plan=Plan(plan.m, first, second)), plan=plan)


def test_unreduced_is_zero_where_there_is_no_expert():
    case = make_case(M=9, K=48, I=32, E=5, topk=3, routing="some_skipped", local=3, seed=2)
    poison = torch.full((case.topk_ids.numel() * case.K,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    got = unreduced(case, workspace13=poison).cpu()
    values, errors = bounds.pair_errors(
        **case.pair_arguments(), numerics=case.numerics(out=None, pair="bfloat16")
    )
    assert_within(got, values, errors, case=case)
    assert (got[torch.as_tensor(oracle.local_ids(case.topk_ids, case.expert_map)) < 0] == 0).all()


@pytest.mark.parametrize("counts", [[3, 0, 20], [20, 20, 20], [0, 0, 1]])
def test_batched(counts):
    case = make_case(M=1, K=40, I=24, E=3, topk=1, bias=True, seed=7)
    x = torch.randn((3, 20, 40), generator=generator(1)).bfloat16()
    for e, n in enumerate(counts):
        x[e, n:] = float("nan")
    tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    w1, w2 = case.w1.to(DEVICE), case.w2.to(DEVICE)
    got = TritonExperts().apply(
        x.to(DEVICE), w1, w2, case.topk_ids.to(DEVICE), "silu", expert_num_tokens=tokens,
        w1_bias=case.w1_bias.to(DEVICE), w2_bias=case.w2_bias.to(DEVICE),
    ).cpu()  # fmt: skip
    for e, n in enumerate(counts):
        if n:
            ids = torch.full((n, 1), e)
            values, errors = bounds.pair_errors(
                x[e, :n], case.w1, case.w2, ids, "silu", case.w1_bias, case.w2_bias,
                numerics=case.numerics(out=None, pair="bfloat16"),
            )  # fmt: skip
            assert_within(got[e, :n], values[:, 0], errors[:, 0], expert=e)


@pytest.mark.parametrize("M", [2, 30])
def test_a_nan_stays_in_its_row(M):
    case = make_case(M=M, K=64, I=32, E=4, topk=2, seed=3)
    clean = run(case)
    x = case.x.clone()
    x[1, 5] = float("nan")
    got = run(case.with_(x=x))
    assert got[1].isnan().all()
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[2:], clean[2:])


def test_content_of_fresh_memory_does_not_matter():
    case = make_case(M=20, K=72, I=40, E=4, topk=2, routing="some_skipped", seed=8)
    with poisoned_empty():
        got = run(case)
    case.check(got)


def test_an_id_out_of_range_is_skipped_or_refused_on_request():
    case = make_case(M=6, K=32, I=16, E=4, topk=2, seed=5)
    ids = case.topk_ids.clone()
    ids[2, 1], ids[4, 0] = 9, -3
    skipped = case.with_(topk_ids=torch.where((ids < 0) | (ids > 3), -1, ids))
    skipped.check(run(case.with_(topk_ids=ids)))
    from moe_cpu.errors import ExpertIdError

    with pytest.raises(ExpertIdError, match=r"topk_ids\[2, 1\].*got 9"):
        run(case.with_(topk_ids=ids), check_ids=True)


def test_scratch_is_reused():
    case = make_case(M=20, K=64, I=32, E=4, topk=2, seed=6)
    experts = TritonExperts()
    first = unreduced(case, experts)
    blocks = {key: block.data_ptr() for key, block in experts._scratch._blocks.items()}
    again = unreduced(case, experts)
    assert torch.equal(first, again)
    assert blocks == {key: block.data_ptr() for key, block in experts._scratch._blocks.items()}


@pytest.mark.pure
def test_plans_by_rows_of_an_expert():
    assert plan_for(8, 128).m == 16
    assert plan_for(16384 * 2, 8) is TABLE[-1][1]
    limits = [limit for limit, _ in TABLE]
    assert limits == sorted(limits)
    assert limits[-1] == float("inf")


@pytest.mark.pure
@pytest.mark.parametrize(
    ("pairs", "experts", "m", "blocks"), [(1, 8, 16, 1), (16, 8, 16, 8), (1000, 8, 16, 70), (128, 1, 128, 1)]
)
def test_blocks_bound(pairs, experts, m, blocks):
    assert blocks_bound(pairs, experts, m) == blocks


@pytest.mark.pure
def test_sorting_starts_where_pairs_meet():
    assert not sorts(1, 8, 8)
    assert not sorts(4, 8, 128)
    assert sorts(5, 8, 128)


@pytest.mark.pure
def test_stages_fit_into_shared_memory():
    launch = Launch(128, 64, 8, 4)
    assert fitted(launch, 128, 2, 2, 232448) is launch
    assert fitted(launch, 128, 2, 2, 101376).stages == 2
    assert fitted(launch, 128, 2, 2, 1).stages == 1
