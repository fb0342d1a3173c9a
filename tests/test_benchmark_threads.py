"""Several numbers of threads: each point with each of them, under ceilings of its own, and what every one gains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from measuring import add_contender, make_quick, suite

from moe_cpu.benchmark import Report, Suite, plot, run, runner, table, timing
from moe_cpu.benchmark.baselines import BASELINES
from moe_cpu.cli import main
from moe_cpu.errors import ArgumentError

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def threads_of_calls(monkeypatch) -> list[int]:
    seen = []
    add_contender(monkeypatch, lambda y, _: seen.append(torch.get_num_threads()) or y)
    return seen


def test_every_point_is_measured_with_each_number(monkeypatch, native):
    seen, told, before = threads_of_calls(monkeypatch), [], torch.get_num_threads()
    plan = suite(threads=(2, 1), tokens=(1, 5), contenders=("native", "odd"), baseline="")
    report = run(plan, progress=told.append)
    assert torch.get_num_threads() == before
    assert [(r.case.M, r.case.threads, r.case.contender) for r in report.rows] == [
        (M, threads, name) for M in (1, 5) for threads in (1, 2) for name in ("native", "odd")
    ]
    assert set(seen) == {1, 2}
    assert sorted(seen[: len(seen) // 2]) == seen[: len(seen) // 2], "one number after the other"
    assert told[:3] == ["ceilings", "tiny: weights", "tiny: M = 1, 1 threads"]
    assert len(told) == runner.steps(plan) == 6
    assert (report.environment["threads"], report.ceilings.threads) == (2, 2)
    assert [c.threads for c in report.fewer_threads] == [1]
    ceilings = {1: report.fewer_threads[0], 2: report.ceilings}
    for row in report.rows:
        assert row.limit == ceilings[row.case.threads].limit(row.work, row.isa)[0]


def test_who_keeps_his_threads_stays_out(monkeypatch):
    seen = threads_of_calls(monkeypatch)
    monkeypatch.setattr(BASELINES["odd"], "fixed_threads", True)
    monkeypatch.setattr(BASELINES["odd"], "prepare", lambda *_: pytest.fail("prepared for nothing"))
    rows = run(suite(threads=(1, 2), contenders=("odd",))).rows
    assert [(r.status, r.case.contender) for r in rows] == [("skipped", "odd"), ("ok", "torch_loop")] * 2
    assert "keeps the threads that it began with" in rows[0].reason
    monkeypatch.undo()
    assert not seen
    assert BASELINES["kt"].fixed_threads


@pytest.fixture
def scaled(monkeypatch, native):
    """A report in which native takes 8 s over the number of threads, and torch_loop always 1 s."""
    make_quick(monkeypatch)

    def interleave(calls, new_inputs, *_):
        for _ in range(6):
            new_inputs()
        native = 8.0 / torch.get_num_threads()
        return {key: [native if key.contender == "native" else 1.0] * 5 for key in calls}

    monkeypatch.setattr(timing, "interleave", interleave)
    return run(suite(threads=(1, 2, 4), tokens=(1, 40), routings=("uniform", "single")))


def rows_named(text: str, name: str) -> list[list[float]]:
    return [[float(word) for word in line.split()[-3:]] for line in text.splitlines() if name in line]


def test_speedups_stand_beside_those_of_the_ceilings(scaled):
    shown = "\n".join(table.lines(scaled))
    for count in (1, 2, 4):
        assert f"ceilings of {count} thread" in shown
    assert rows_named(shown, "speed-up over 1 thread") == [[1, 2, 4]] * 2, "of each routing"
    assert rows_named(shown, "M = 40, native") == [[1, 2, 4]] * 2
    assert rows_named(shown, "M = 1, torch_loop") == [[1, 1, 1]] * 2
    ceilings = [*scaled.fewer_threads, scaled.ceilings]
    bandwidth = [c.read / ceilings[0].read for c in ceilings]
    assert rows_named(shown, "read bandwidth")[0] == pytest.approx(bandwidth, rel=0.01)
    isa = scaled.rows[0].isa
    peak = [c.matrix[isa] / ceilings[0].matrix[isa] for c in ceilings]
    assert rows_named(shown, f"matrix peak, {isa}")[0] == pytest.approx(peak, rel=0.01)
    limits = {(r.case.M, r.case.routing, r.case.threads): r.limit for r in scaled.rows if r.ours}
    want = [limits[1, "uniform", 1] / limits[1, "uniform", n] for n in (1, 2, 4)]
    assert rows_named(shown, "its limit")[0] == pytest.approx(want, rel=0.01)


def test_one_number_of_threads_has_no_speedups():
    shown = "\n".join(table.lines(run(suite())))
    assert "speed-up" not in shown
    assert "ceilings: " in shown
    assert "threads   contender" not in shown


def test_they_survive_the_file_and_can_be_drawn(scaled, tmp_path):
    pytest.importorskip("matplotlib")
    scaled.save(tmp_path / "r.json")
    assert Report.load(tmp_path / "r.json") == scaled
    plot.save(scaled, tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text()
    assert drawn.count("<!-- speed-up with more threads -->") == 2
    for name in ("read bandwidth", "M = 40, native", "M = 1, torch_loop"):
        assert f"<!-- {name} -->" in drawn
    scaled.rows = [row for row in scaled.rows if row.case.threads == 4]
    plot.save(scaled, tmp_path / "p.svg")
    assert "speed-up" not in (tmp_path / "p.svg").read_text()


def test_on_the_command_line(capsys, tmp_path):
    arguments = ["bench", "--shape", "4,2,64,48", "--tokens", "3", "--seconds", "0.01", "--baseline", "none"]
    assert main([*arguments, "--threads", "1,2", "--backend", "reference"]) == 0
    assert "speed-up over 1 thread" in capsys.readouterr().out
    assert main(["bench", "--overheads", "--threads", "1,2"]) == 1
    assert "--threads expects one number where layers are not what is measured" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [0, (1, 0), (2, 2), (), ("2", 1), (1.5,), 5000])
def test_numbers_that_are_refused(threads):
    with pytest.raises(ArgumentError, match="threads: expected different whole numbers from 1 to 1024"):
        suite(threads=threads)
    with pytest.raises(ArgumentError, match="one number on cuda"):
        suite(threads=(1, 2), device="cuda")


def test_suites_of_the_project_can_be_read(tmp_path):
    found = {path.stem: Suite.load(path) for path in (BENCH / "suites").glob("*.json")}
    assert found["threads"].thread_counts == (1, 2, 4, 8, 16)
    assert found["skew"].routings == ("uniform", "zipf-1.2", "single")
    (tmp_path / "s.json").write_text(json.dumps({"shapes": ["mixtral-8x7b"], "threads": [4, 1]}))
    assert Suite.load(tmp_path / "s.json").thread_counts == (1, 4), "least first"


def test_results_of_the_project_can_be_read():
    paths = [
        path for path in (BENCH / "results").glob("*.json") if "kind" not in json.loads(path.read_text())
    ]
    assert len(paths) > 5
    for path in paths:
        report = Report.load(path)
        assert len(list(table.lines(report))) > len(report.rows)
