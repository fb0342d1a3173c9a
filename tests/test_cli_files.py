"""Results files and pictures that the command line reads and writes, and those that it refuses."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from measuring import TINY, make_quick

RESULTS = Path(__file__).parents[1] / "bench" / "results" / "emerald-rapids-vllm.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def test_a_picture_without_matplotlib_is_refused_before_measuring(command, monkeypatch, tmp_path):
    monkeypatch.setattr("moe_cpu.cli.bench.run", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = command(*TINY, "--plot", tmp_path / "p.png")
    assert (status, out) == (1, "")
    assert err == "moe-cpu: plot: drawing needs matplotlib; install moe-cpu[plot]\n"


def test_a_disk_that_is_full(command):
    status, _, err = command(*TINY, "--baseline", "none", "--json", "/dev/full")
    assert status == 1
    assert re.fullmatch(r"moe-cpu: .*No space left on device.*\n", err)


def test_a_picture_of_an_unknown_kind_is_refused_before_measuring(command, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("moe_cpu.cli.bench.run", lambda *_, **__: pytest.fail("it measured"))
    for arguments in ([*TINY, "--plot"], ["plot", RESULTS]):
        status, out, err = command(*arguments, tmp_path / "p.foo")
        assert (status, out) == (1, "")
        assert re.match(r"moe-cpu: plot: expected a file ending in one of .*\.png.*p\.foo", err), err
    status, _, err = command("plot", RESULTS, tmp_path / "none" / "p.png")
    assert (status, "its folder must exist" in err) == (1, True)


def test_a_results_file_that_is_none(command, tmp_path):
    file = tmp_path / "r.json"
    report = {"schema": 1, "environment": None, "ceilings": None, "rows": []}
    rows = {
        **report,
        "environment": dict.fromkeys(("cpu", "threads", "moe_cpu", "commit", "torch"), "x"),
        "rows": [3],
    }
    for text in (
        "",
        "[]",
        '{"schema": 0}',
        json.dumps(report),
        json.dumps({**report, "environment": {}}),
        json.dumps(rows),
    ):
        file.write_text(text)
        status, _, err = command("plot", file, tmp_path / "p.png")
        assert status == 1
        assert err.startswith("moe-cpu: results: ")
        assert err.count("results: ") == 1


def test_results_that_no_picture_shows(command, tmp_path):
    for name in ("vllm-plugin", "emerald-rapids-overheads"):
        status, _, err = command("plot", RESULTS.with_name(name + ".json"), tmp_path / "p.png")
        assert status == 1
        assert re.match(r"moe-cpu: plot: .*\.json holds .*, of which there is no picture", err), err


def test_a_results_file_that_lacks_something(command, tmp_path):
    pytest.importorskip("matplotlib")
    file, report = tmp_path / "r.json", json.loads(RESULTS.read_text())
    report["rows"] = report["rows"][:1]
    report["rows"][0]["times"] = {"median": None}
    file.write_text(json.dumps(report))
    status, _, err = command("plot", file, tmp_path / "p.png")
    assert status == 1
    assert re.match(r"moe-cpu: (results|plot): .*r\.json", err), err
