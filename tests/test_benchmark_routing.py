"""Routings of measurements: whom they send tokens to, and how a skewed one stands beside the uniform one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from measuring import SHAPE, add_contender, make_quick, suite

from moe_cpu.benchmark import Report, inputs, memory, routing, run, table, timing
from moe_cpu.benchmark.baselines import BASELINES
from moe_cpu.errors import ArgumentError
from moe_cpu.models import ModelShape

ALL = ("uniform", "zipf-1.2", "single")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


@pytest.mark.parametrize("name", ["uniform", "zipf", "zipf-1.2", "single"])
def test_ids_and_weights(name):
    shape = ModelShape("", E=16, topk=3, K=8, I=8)
    weights, ids = routing.random_routing(shape, 400, name, inputs.generator(1), 7)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 3 for row in ids.tolist()), "different within a row"
    assert 0 <= int(ids.min()) <= int(ids.max()) < 16
    torch.testing.assert_close(weights.sum(1), torch.ones(400))
    again = routing.random_routing(shape, 400, name, inputs.generator(1), 7)
    assert torch.equal(again[1], ids)
    other = routing.random_routing(shape, 400, name, inputs.generator(2), 7)
    assert not torch.equal(other[1], ids), "fresh from call to call"


@pytest.mark.parametrize(("name", "exponent"), [("uniform", 0), ("zipf", 1), ("zipf-1", 1), ("zipf-1.2", 1.2), ("zipf-3", 3)])  # fmt: skip
def test_popularity_falls_with_the_rank(name, exponent):
    E, M = 8, 40_000
    shape = ModelShape("", E=E, topk=1, K=8, I=8)
    _, ids = routing.random_routing(shape, M, name, inputs.generator(3), 7)
    share = ids.flatten().bincount(minlength=E).sort(descending=True).values / M
    want = torch.arange(1, E + 1, dtype=torch.float32) ** -exponent
    torch.testing.assert_close(share, want / want.sum(), rtol=0, atol=0.01)
    _, same = routing.random_routing(shape, M, name, inputs.generator(4), 7)
    if exponent:
        assert ids.mode(dim=0).values == same.mode(dim=0).values, "calls of a case agree about who is popular"


@pytest.mark.parametrize(
    "name", ["zipf-", "zipf-x", "zipf-0", "zipf--1", "zipf-inf", "zipf-nan", "uniform-2", ""]
)
def test_names_that_are_none(name):
    with pytest.raises(ArgumentError, match=r"zipf-<exponent> with a number above 0"):
        suite(routings=(name,))


def test_limits_count_the_experts_that_are_read():
    report = run(suite(routings=ALL, tokens=(200,), contenders=("native",)))
    expert, tokens = 3 * SHAPE.K * SHAPE.I * 2, 2 * 200 * SHAPE.K * 2
    read = {row.case.routing: (row.work.bytes - tokens) / expert for row in report.rows}
    assert read == {"uniform": SHAPE.E, "zipf-1.2": SHAPE.E, "single": SHAPE.topk}
    assert {row.work.flops for row in report.rows} == {2 * 200 * SHAPE.topk * 3 * SHAPE.K * SHAPE.I}
    for row in report.rows:
        assert row.limit == report.ceilings.limit(row.work, row.isa)[0]


def test_skew_stands_beside_uniform_and_the_limits(monkeypatch, tmp_path):
    seconds = {"uniform": 4.0, "zipf-1.2": 3.0, "single": 1.0}

    def interleave(calls, new_inputs, *_):
        for _ in range(6):
            new_inputs()
        return {key: [seconds[key.routing] * (key.contender == "native" or 2)] * 5 for key in calls}

    monkeypatch.setattr(timing, "interleave", interleave)
    report = run(suite(routings=ALL, tokens=(1, 40)))
    assert [(r.case.M, r.case.routing, r.case.contender) for r in report.rows] == [
        (M, name, contender) for M in (1, 40) for name in ALL for contender in ("native", "torch_loop")
    ]
    uniform = {(r.case.M, r.case.contender): r for r in report.rows if r.case.routing == "uniform"}
    for row in report.rows:
        plain = uniform[row.case.M, row.case.contender]
        assert (row.comparison is None) == (row.case.contender == "torch_loop")
        assert row.comparison is None or row.comparison.ratio == 2.0, (
            "with the baseline's calls of the same routing"
        )
        if row is plain:
            assert row.skew is None
            continue
        assert row.skew.time.ratio == seconds[row.case.routing] / 4
        assert row.skew.limit == row.limit / plain.limit
        measured = (row.times.median / plain.times.median) / (row.limit / plain.limit)
        assert row.skew.excess == pytest.approx(measured - 1)
    shown = "\n".join(table.lines(report))
    assert "beside uniform" in shown
    assert (
        f"0.25x, limit {report.rows[-2].skew.limit:.3g}x: {100 * report.rows[-2].skew.excess:+.0f} %" in shown
    )
    assert shown.count("routing\n") == 3, "one table for each routing"
    report.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == report


def test_without_uniform_routing_or_ceilings_there_is_nothing_beside():
    alone = run(suite(routings=("single",)))
    assert [row.skew for row in alone.rows] == [None, None]
    assert "beside uniform" not in "\n".join(table.lines(alone))


def test_routings_take_turns_on_different_layers(monkeypatch):
    seen = []
    add_contender(monkeypatch, lambda y, _: y)
    odd = BASELINES["odd"]
    monkeypatch.setattr(odd, "prepare", lambda self, layer, shape: seen.append(layer.w1.data_ptr()) or layer)
    used = []
    plain = odd.run

    def run_noted(self, prepared, call, shape):
        used.append(seen.index(prepared.w1.data_ptr()))
        return plain(self, prepared, call, shape)

    monkeypatch.setattr(odd, "run", run_noted)
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 2 * memory.layer_bytes(SHAPE))
    rows = run(suite(routings=ALL, contenders=("odd",), baseline="", cold=True)).rows
    assert len(seen) == 4 == rows[0].layers
    timed = used[len(ALL) :]  # the checks come first
    assert set(timed) == {0, 1, 2, 3}
    rounds = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert all(len(set(layers)) == 3 for layers in rounds), "no layer twice in a round"


def test_a_case_takes_the_same_time_however_many_routings_there_are(monkeypatch):
    given = []
    plain = timing.interleave
    monkeypatch.setattr(timing, "interleave", lambda *a: given.append(a[2]) or plain(*a))
    for routings in (("uniform",), ALL):
        run(dataclasses.replace(suite(seconds=0.02), routings=routings))
    assert given == [0.02, pytest.approx(0.06)]
