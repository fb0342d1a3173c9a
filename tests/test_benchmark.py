"""Measurements: checked before timed, planned before allocated, and all of it in the results file."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import bounds
import oracle
import pytest
import torch
from measuring import SHAPE, add_contender, make_quick, suite

from moe_cpu import isa, machine, ops
from moe_cpu.benchmark import Report, backends, check, inputs, memory, roofline, routing, run, timing
from moe_cpu.benchmark.baselines import BASELINES
from moe_cpu.benchmark.baselines.torch_loop import TorchLoop
from moe_cpu.errors import ArgumentError, OutOfMemory
from moe_cpu.models import ModelShape, find


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def with_element(value):
    def answer(y, _):
        y[-1, 7] = value
        return y

    return answer


FAULTS = {
    "a twentieth too much": (lambda y, _: y * 1.05, "standard deviations"),
    "another token's row": (lambda y, _: y.roll(1, 0), "rounding explains at most"),
    "weighted twice": (lambda y, call: y * call.topk_weights[:, :1].to(y.dtype), "is off by"),
    "one element": (with_element(40.0), r"element \[4, 7\] is off by"),
    "not a number": (with_element(math.nan), "token 4 is not finite"),
    "float32": (lambda y, _: y.float(), r"expected \[M, 64\] bf16, got \[5, 64\] torch.float32"),
    "columns missing": (lambda y, _: y[:, :60], r"expected \[M, 64\] bf16, got \[5, 60\]"),
}


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_answer_gets_no_time(monkeypatch, fault, ours):
    answer, reason = FAULTS[fault]
    calls = add_contender(monkeypatch, answer, ours)
    report = run(suite(contenders=("odd",)))
    odd, loop = report.rows
    assert (odd.status, odd.times, odd.comparison, odd.tokens_per_second) == ("wrong", None, None, None)
    assert re.search(reason, odd.reason), odd.reason
    assert calls == [5], "called for the check, and never again"
    assert loop.status == "ok"
    assert report.ok != ours, "only a fault of ours fails the run"


def test_a_right_answer_is_checked_once_and_then_timed(monkeypatch):
    calls = add_contender(monkeypatch, lambda y, _: y)
    (odd, loop) = run(suite(contenders=("odd",))).rows
    assert odd.status == "ok"
    assert odd.relative_error < 0.01
    assert len(calls) == 2 + odd.times.n, (
        "the check, a first round that does not count, and the calls that do"
    )
    assert odd.times.n == loop.times.n >= timing.MIN_CALLS
    assert odd.times.p10 <= odd.times.median <= odd.times.p90
    assert odd.comparison is not None
    assert loop.comparison is None, "the baseline is not compared with itself"


def test_exceptions_become_rows(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("no such luck")

    calls = add_contender(monkeypatch, fail)
    odd, loop = run(suite(contenders=("odd",))).rows
    assert (odd.status, odd.reason, odd.times) == ("failed", "ZeroDivisionError: no such luck", None)
    assert loop.status == "ok"
    monkeypatch.setattr(BASELINES["odd"], "prepare", fail)
    report = run(suite(contenders=("odd",), tokens=(1, 3)))
    assert [row.status for row in report.rows] == ["failed", "ok"] * 2
    assert report.rows[0].reason == "preparing weights: ZeroDivisionError: no such luck"
    assert calls == [5], "what could not be prepared is not run"


def test_contenders_that_cannot_take_part_say_why(monkeypatch):
    add_contender(monkeypatch, lambda y, _: y)
    monkeypatch.setattr(BASELINES["odd"], "max_tokens", 3)
    report = run(suite(contenders=("odd", "vllm"), tokens=(3, 4)))
    assert [row.status for row in report.rows if row.case.contender == "odd"] == ["ok", "skipped"]
    assert report.rows[3].reason == "takes at most 3 tokens a call"
    with pytest.raises(ArgumentError, match=r"contender.*native.*torch_loop.*'fast'"):
        run(suite(contenders=("fast",)))
    with pytest.raises(ArgumentError, match=r"native:mmx.*amx.*'mmx'"):
        run(suite(contenders=("native:mmx",)))
    with pytest.raises(ArgumentError, match=r"only native takes an instruction set.*onednn:avx2"):
        run(suite(contenders=("onednn:avx2",)))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai", "relu2"])
def test_the_checks_own_formulas(activation):
    """Its values are the oracle's, and its bound contains that of every order of rounding that the tests know."""
    shape = ModelShape("", E=5, topk=3, K=72, I=40, activation=activation, has_bias=activation != "silu")
    layer, rng = inputs.random_layer(shape, 1), inputs.generator(2)
    call = inputs.Inputs(
        inputs.random_tokens(20, 72, rng), *routing.random_routing(shape, 20, "uniform", rng, 0)
    )
    call.topk_ids[3, 1] = -1
    rows = check.sample_tokens(20, rng)
    assert {0, 19} < set(rows.tolist())
    assert len(rows.unique()) == check.SAMPLED_TOKENS
    want = check.expected(layer, call, shape, rows)
    arguments = (call.x[rows], layer.w1, layer.w2, call.topk_weights[rows], call.topk_ids[rows], activation)
    bias = {"w1_bias": layer.w1_bias, "w2_bias": layer.w2_bias}
    exact = oracle.moe(*arguments, **bias)
    torch.testing.assert_close(want.value, torch.from_numpy(exact), rtol=1e-12, atol=1e-12)
    numerics = bounds.Numerics(first="bfloat16", pair="bfloat16")
    for kind, mine in ((bounds.Worst, want.bound), (bounds.Typical, want.variance.sqrt())):
        theirs = torch.from_numpy(bounds.layer_errors(*arguments, **bias, numerics=numerics, kind=kind))
        if kind is bounds.Typical:
            mine, theirs = mine.norm(dim=1), theirs.norm(dim=1)  # what the check looks at
        assert (mine > theirs).all()
        assert (mine < 4 * theirs).all(), "and no wider than its longer chain explains"


@pytest.fixture
def nothing_happens(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("it was to be refused first")

    monkeypatch.setattr(roofline, "measure", refuse)
    monkeypatch.setattr(inputs, "random_layer", refuse)


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch, nothing_happens):
    monkeypatch.setattr(memory, "available_bytes", lambda: 30 << 30)
    with pytest.raises(OutOfMemory) as refusal:
        run(suite(shapes=(SHAPE, find("deepseek-v3")), contenders=("native", "reference")))
    # 256 experts of 3 * 7168 * 2048 bf16; packed once, dense once for both others, and twice while they are made.
    assert "weights of one layer 21.00 GiB, 2 layouts of them for native, reference, torch_loop" in str(
        refusal.value
    )
    assert "deepseek-v3 with M = 5: 85.01 GiB" in str(refusal.value)
    assert "30.00 GiB are available; take fewer contenders" in str(refusal.value)


def test_layers_exceed_twice_the_cache_as_far_as_memory_allows():
    one = memory.layer_bytes(SHAPE)
    assert one == 6 * 3 * 64 * 48 * 2
    contenders = [backends.find("native")]
    gib = 1 << 30
    for cache, layers in ((0, 1), (one // 2, 1), (one // 2 + 1, 2), (4 * one, 8), (100 * one, 16)):
        plan = memory.plan(SHAPE, 5, contenders, cache, 0, 4 * gib)
        assert (plan.layers, plan.wanted_layers, list(plan.notes(SHAPE, cache))) == (layers, layers, [])
    big = ModelShape("big", E=8, topk=2, K=4096, I=8192)
    plan = memory.plan(big, 5, contenders, 3 * gib, 0, 9 * gib)
    assert (plan.layers, plan.wanted_layers) == (3, 4)
    assert "memory holds 3 of the 4 layers" in next(plan.notes(big, 3 * gib))
    assert plan.needed <= plan.available


def test_the_cache_is_known_where_the_system_hides_it(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(memory, "_CACHES", tmp_path)
    assert memory.last_level_cache_bytes() == max(machine.cpu_description()["cache_bytes"].values()) > 0
    for number, size in enumerate(("48K", "2M", "32K")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert memory.last_level_cache_bytes() == 2 << 20
    monkeypatch.setattr(memory, "_CACHES", tmp_path / "none")
    monkeypatch.setattr(ops, "available", lambda: False)
    assert memory.last_level_cache_bytes() == 0


def test_an_unknown_cache_is_noted(monkeypatch):
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 0)
    assert "nobody says how large" in run(suite(cold=True)).notes[0]


@pytest.mark.parametrize(("faster", "noted"), [(1e-6, True), (1e6, False)])
def test_results_beyond_a_limit_are_explained(monkeypatch, faster, noted):
    make_quick(monkeypatch)
    ceilings = roofline.Ceilings({name: 1e13 * faster for name in isa.names()}, 1e12 * faster, threads=1)
    monkeypatch.setattr(roofline, "measure", lambda *_: ceilings)
    kept = []
    run(suite(cold=True), keep=lambda report: kept.append(list(report.notes)))
    assert any("more than 100 %" in note for note in kept[-1]) is noted


def test_a_cold_run_rotates_layers_or_empties_the_cache(monkeypatch):
    add_contender(monkeypatch, lambda y, _: y)
    few, many = run(suite(contenders=("odd",), tokens=(1, 40), cold=True, baseline="")).rows
    assert few.layers == many.layers == math.ceil(2 * (1 << 18) / memory.layer_bytes(SHAPE)) == 5
    assert few.evicted, "one token reads two of the six experts"
    assert not many.evicted
    assert not run(suite()).rows[0].evicted


def test_results_survive_the_file(tmp_path):
    kept = []
    told = []
    report = run(
        suite(contenders=("native", "vllm"), tokens=(1, 5)),
        progress=told.append,
        keep=lambda so_far: kept.append(len(so_far.rows)),
    )
    assert kept == [3, 6], "after each point"
    assert told == ["ceilings", "tiny: weights", "tiny: M = 1", "tiny: M = 5"]
    path = tmp_path / "new folder" / "results.json"
    report.save(path)
    assert Report.load(path) == report
    data = json.loads(path.read_text())
    assert {"time", "cpu", "threads", "isa", "compiler", "torch", "commit", "variables"} <= set(
        data["environment"]
    )
    assert data["environment"]["threads"] == 1
    assert data["ceilings"]["read"] > 1e8
    assert all(peak > 1e8 for peak in data["ceilings"]["matrix"].values())
    row = report.rows[0]
    assert row.limit == max(
        row.work.flops / report.ceilings.peak(row.isa), row.work.bytes / report.ceilings.read
    )
    assert row.efficiency == pytest.approx(row.limit / row.times.median)
    assert row.bandwidth == pytest.approx(row.work.bytes / row.times.median)
    path.write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(ArgumentError, match=r"schema 1, got schema 99"):
        Report.load(path)
    for broken in ("{", "{}", "[]", json.dumps({**data, "rows": [{}]})):
        path.write_text(broken)
        with pytest.raises(ArgumentError, match="results"):
            Report.load(path)


def test_threads_are_set_and_taken_back():
    before = torch.get_num_threads()
    for threads in (1, 3):
        report = run(suite(threads=threads))
        assert (report.rows[0].case.threads, report.ceilings.threads) == (threads, threads)
        assert torch.get_num_threads() == before
    assert run(suite(threads=None)).rows[0].case.threads == before


def test_routed_work_counts_distinct_experts_and_no_skipped_pair():
    work = roofline.routed_work(SHAPE, torch.tensor([[0, 1], [0, -1]], dtype=torch.int32))
    elements = 3 * 64 * 48
    assert (work.flops, work.bytes) == (2 * 3 * elements, 2 * elements * 2 + 2 * 2 * 64 * 2)
    biased = dataclasses.replace(SHAPE, has_bias=True)
    assert (
        roofline.routed_work(biased, torch.tensor([[4]])).bytes == elements * 2 + (96 + 64) * 4 + 2 * 64 * 2
    )


def test_a_comparison_says_what_the_interval_allows():
    base = [1.0 + 0.01 * (i % 7) for i in range(100)]
    assert timing.compare([t / 2 for t in base], base).verdict == "better"
    assert timing.compare([t * 2 for t in base], base).ratio == pytest.approx(0.5)
    assert timing.compare([t * 2 for t in base], base).verdict == "worse"
    shuffled = base[3:] + base[:3]
    assert timing.compare(shuffled, base).verdict == "within noise"
    assert timing.summarise([3.0, 1.0, 2.0]) == timing.Times(2.0, pytest.approx(1.2), pytest.approx(2.8), 3)


def test_contenders_take_turns_in_starting():
    order = []
    calls = {name: lambda *_, name=name: order.append(name) for name in "abc"}
    timing.interleave(calls, lambda: None, 0.0, lambda _: None, lambda _: None)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert rounds == ["abc", "bca", "cab"] * 2
    assert len(rounds) == timing.MIN_CALLS + 1


def test_baselines_agree_with_the_check():
    """The one that ratios are stated against must be right itself, on every activation and with biases."""
    for activation in ("silu", "gelu", "gelu_tanh", "swigluoai", "relu2"):
        shape = dataclasses.replace(SHAPE, activation=activation, has_bias=True)
        report = run(suite(shapes=(shape,), contenders=("native", "grouped_mm"), tokens=(1, 33)))
        assert {row.status for row in report.rows} == {"ok"}, [row.reason for row in report.rows]
    assert TorchLoop().why_not(SHAPE) is None
