"""What surrounds the experts: checked before it is timed, planned before it is allocated, and beside copying."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from measuring import make_quick

from moe_cpu import PackedExperts
from moe_cpu.benchmark import inputs, memory
from moe_cpu.benchmark.overheads import layer_call, packing, packing_peak, runner, sorting
from moe_cpu.benchmark.overheads.report import OverheadsReport, PackingPeak, costs
from moe_cpu.cli import main
from moe_cpu.errors import ArgumentError, OutOfMemory
from moe_cpu.models import ModelShape

SHAPE = ModelShape("tiny", E=4, topk=2, K=100, I=72)


@pytest.fixture(autouse=True)
def quick(monkeypatch, native):
    make_quick(monkeypatch)
    monkeypatch.setattr(sorting, "TOKENS", 500)


def run_tiny():
    return runner.run(SHAPE, threads=2, seconds=0.01)


def test_the_command_prints_and_writes_all_of_it(capsys, tmp_path):
    results = tmp_path / "r.json"
    arguments = ["--shape", "4,2,100,72", "--threads", "2", "--seconds", "0.01", "--json", str(results)]
    assert main(["bench", "--overheads", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in (
        "M=1, E=8, topk=2, K=64, I=32",
        "moe_align_block_size, 500 x 8 ids, E=256",
        "times as long as copying them",
        "PackedExperts.pack takes ",
        "% of its GB/s",
        "packing custom, each dense expert let go once it is packed: at most ",
    ):
        assert words in out
    report = OverheadsReport.load(results)
    report.save(tmp_path / "again.json")
    assert OverheadsReport.load(tmp_path / "again.json") == report
    assert report.environment["threads"] == 2
    assert [(c.what, c.threads) for c in report.costs] == [
        *(("layer call", 1), ("layer call", 2)), *[("sorting ids", 2)] * 3, *[("packing", 2)] * 4
    ]  # fmt: skip
    assert all(0 < c.times.p10 <= c.times.median <= c.times.p90 for c in report.costs)
    assert main(["plot", str(results), str(tmp_path / "p.png")]) == 1
    assert "no picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "1", "--plot", "x.png"], "--tokens and --plot would measure layers"),
        (["--model", "olmoe-1b-7b,mixtral-8x7b"], "one layer, got olmoe-1b-7b, mixtral-8x7b"),
        (["--shape", "4,2,64,64", "--experts", "5"], "E = 4"),
        (["--seconds", "nan"], "seconds: expected a finite number above 0, got nan"),
        (["--threads", "5000"], "from 1 to 1024, got 5000"),
        (["--seed", "-1"], "seed: expected a whole number from 0"),
        (["--json", "missing/r.json"], "file that can be written"),
    ],
)
def test_options_that_are_refused(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(layer_call, "measure", lambda *_: pytest.fail("it measured"))
    assert main(["bench", "--overheads", *arguments]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_what_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 4 << 30)
    monkeypatch.setattr(layer_call, "measure", lambda *_: pytest.fail("it measured"))
    with pytest.raises(
        OutOfMemory, match=r"5\.50 GiB are needed .*weights 1\.12 GiB.*4\.00 GiB are available"
    ):
        runner.run(ModelShape("qwen", E=128, topk=8, K=2048, I=768))


def test_times_stand_beside_copies():
    mine, again, copy = costs(
        "x", 3, {"a": [4.0, 4.0], "b": [2.0, 2.0], "c": [1.0, 1.0]}, {"a": 8, "c": 6}, 2
    )
    assert (mine.threads, mine.times.median, mine.bandwidth, copy.bandwidth) == (3, 4.0, 2.0, 6.0)
    assert again.bandwidth is None
    assert {name: c.ratio for name, c in mine.beside.items()} == {"c": 4.0}
    assert (again.beside["c"].ratio, copy.beside) == (2.0, {})


def test_threads_are_taken_back(monkeypatch):
    monkeypatch.setattr(packing_peak, "measure", lambda *_: PackingPeak(1, 1, 1, 1))
    before = torch.get_num_threads()
    run_tiny()
    assert torch.get_num_threads() == before


def twice(original):
    return lambda *arguments: original(*arguments) * 2


def no_pair(ids):
    return ids.flatten() * 0, torch.zeros(ids.numel(), dtype=torch.int32), torch.tensor([ids.numel()])


@pytest.mark.parametrize(
    ("where", "name", "fault", "what", "reason"),
    [
        (layer_call, "_call", twice(layer_call._call), "layer call", "rounding explains at most"),
        (sorting, "_align", no_pair, "sorting ids", "expected each of 4000 pairs once"),
        (packing, "why_wrong", lambda *_: "odd", "packing", "odd"),
    ],
)
def test_a_wrong_answer_gets_no_time(monkeypatch, capsys, where, name, fault, what, reason):
    monkeypatch.setattr(where, name, fault)
    monkeypatch.setattr(packing_peak, "measure", lambda *_: PackingPeak(1, 1, 1, 1))
    report = run_tiny()
    assert not report.ok
    (wrong,) = [cost for cost in report.costs if cost.what == what]
    assert wrong.times is None
    assert reason in wrong.wrong
    monkeypatch.setattr(runner, "run", lambda *_, **__: report)
    assert main(["bench", "--overheads"]) == 1
    assert f"is wrong: {wrong.wrong}" in capsys.readouterr().out


def test_sorted_ids_are_checked_pair_by_pair():
    ids = torch.tensor([[0, 3], [3, 1]], dtype=torch.int32)
    right = sorting._align(ids)
    assert sorting.why_wrong(ids, *right) is None
    places, owners, used = (t.clone() for t in right)
    places[[0, sorting.BLOCK]] = places[[sorting.BLOCK, 0]]
    assert sorting.why_wrong(ids, places, owners, used) == "a pair stands in a block of another expert"
    places[sorting.BLOCK] = places[0]
    assert "one of them twice" in sorting.why_wrong(ids, places, owners, used)


def test_packed_weights_are_unpacked_and_compared():
    layer = inputs.random_layer(SHAPE, 1)
    packed = PackedExperts.pack(*layer)
    assert packing.why_wrong(layer, packed) is None
    packed.w2[-1, 3] += 1
    assert packing.why_wrong(layer, packed) == "expert 3 is not what it was before it was packed"


def test_packing_lets_go_of_dense_experts(set_threads):
    w1, _ = packing_peak._experts(SHAPE)
    kept = [weakref.ref(w) for w in w1._left]
    matrices = iter(w1)
    for left in range(3, -1, -1):
        assert next(matrices).shape == (144, 100)
        assert sum(r() is not None for r in kept) == left
    shape = ModelShape("small", E=24, topk=2, K=1024, I=1024)
    peak = packing_peak.measure(shape, 1)
    assert peak.dense == 24 * peak.expert == memory.layer_bytes(shape) == peak.packed
    assert peak.dense < peak.peak < peak.dense + 6 * peak.expert


def test_a_process_that_fails_is_a_note(monkeypatch):
    monkeypatch.setattr(packing_peak, "__name__", "moe_cpu.nothing_of_that_name")
    report = run_tiny()
    assert (report.peak, report.ok) == (None, False)
    assert report.notes[0].startswith(
        "memory of packing was not measured: packing in a process of its own ended"
    )


def test_files_that_are_none(tmp_path):
    file = tmp_path / "r.json"
    for data in ({}, {"kind": "overheads", "schema": 9}, {"kind": "overheads", "schema": 1}):
        file.write_text(json.dumps(data))
        with pytest.raises(ArgumentError, match="results: "):
            OverheadsReport.load(file)
