"""The command line: what it prints, writes and refuses, and with which exit status."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from measuring import TINY, add_contender, make_quick

from moe_cpu import experts, isa
from moe_cpu.benchmark import Report, backends, environment, memory
from moe_cpu.cli import info, support_matrix
from moe_cpu.models import MODELS

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def test_info_says_what_runs_and_why_not(command):
    status, out, _ = command("info")
    assert status == 0
    for name in (*isa.names(), *experts.NAMES, *info.VARIABLES):
        assert f"  {name} " in out
    for backend in experts.list_backends():
        assert backend.available or backend.reason in out
    assert "CPUs, last-level cache" in out
    assert "libgomp" in out


def test_the_version_is_that_of_results(command):
    assert command("--version") == (0, f"moe-cpu {environment.version()}\n", "")


def test_info_for_programs(command):
    status, out, _ = command("info", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["active_isa"] == isa.active()
    assert found["isas"] == {name: isa.why_not(name) for name in isa.names()}
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert set(found["backends"]) == set(experts.NAMES)


def test_every_variable_that_is_read_is_listed():
    sources = "".join(path.read_text() for path in Path(info.__file__).parents[1].rglob("*.py"))
    assert set(re.findall(r"\bMOE_CPU_[A-Z_]*[A-Z]\b", sources)) == set(info.VARIABLES)


def test_the_readme_shows_what_the_backends_say(command):
    _, out, _ = command("info", "--markdown")
    readme = (ROOT / "README.md").read_text()
    begin, end = (f"<!-- {word}: moe-cpu info --markdown -->\n" for word in ("begin", "end"))
    assert readme.partition(begin)[2].partition(end)[0] == out, (
        "paste `moe-cpu info --markdown` into README.md"
    )


def test_the_matrix_does_not_depend_on_the_machine(monkeypatch):
    """A backend that this machine lacks has the column it would have elsewhere."""
    before = support_matrix.rows()
    plain = experts.backend_class("onednn").supports

    def as_if_absent(config):
        ok, reason = plain(config)
        return (False, "oneDNN is not here") if ok else (ok, reason)

    monkeypatch.setattr(experts.backend_class("onednn"), "supports", staticmethod(as_if_absent))
    assert support_matrix.rows() == before


def test_bench_prints_a_table_and_writes_files(command, tmp_path):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "r.json", tmp_path / "p.png"
    status, out, err = command(*TINY, "--baseline", "torch_loop", "--json", results, "--plot", picture)
    assert status == 0, err
    assert err == "", "no progress bar off a terminal"
    assert "custom: E=4 topk=2 K=64 I=48, silu, uniform routing" in out
    for word in (
        "ceilings: ",
        "median ms",
        "p10 - p90",
        "TFLOP/s",
        "GB/s",
        "% of limit",
        "tokens/s",
        "1 threads",
    ):
        assert word in out
    report = Report.load(results)
    assert [(r.case.M, r.case.contender, r.status) for r in report.rows if r.case.contender != "onednn"] == [
        (M, name, "ok") for M in (1, 3) for name in ("native", "torch_loop")
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.svg"
    assert command("plot", results, again)[0] == 0
    assert "<svg" in again.read_text()


def test_every_named_instruction_set_is_run(command, tmp_path):
    able, results = isa.available(), tmp_path / "r.json"
    status, _, err = command(
        *TINY, "--backend", "native", "--isa", ",".join(able), "--baseline", "none", "--json", results
    )
    assert status == 0, err
    report = Report.load(results)
    assert [row.isa for row in report.rows] == [*able] * 2
    assert set(report.ceilings.matrix) == set(able)


def test_a_suite_file_and_options_over_it(command, tmp_path):
    file, results = tmp_path / "suite.json", tmp_path / "r.json"
    shapes = [
        {"model": "qwen3-30b-a3b", "E": 8},
        {"E": 4, "topk": 1, "K": 33, "I": 20, "activation": "relu2"},
    ]
    file.write_text(json.dumps({"about": "", "shapes": shapes[1:], "contenders": ["native"], "baseline": ""}))
    arguments = (
        "--suite",
        file,
        "--tokens",
        2,
        "--routing",
        "zipf,single",
        "--seconds",
        0.01,
        "--json",
        results,
    )
    assert command("bench", *arguments, "--threads", 1)[0] == 0
    rows = Report.load(results).rows
    assert [(r.case.M, r.case.routing, r.case.shape.K) for r in rows] == [(2, "zipf", 33), (2, "single", 33)]


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        ("{", "cannot be read"), ("[]", "expected a JSON object"), ("{}", "at least one shape"),
        ({"shape": []}, "expected keys among .*shapes.*; got shape"), ({"shapes": ["gpt-2"]}, "'gpt-2'"),
        ({"shapes": "mixtral-8x7b"}, "list of shapes"), ({"tokens": 5}, "list of tokens, got 5"),
        ({"tokens": ["5"]}, "at least 1, got '5'"), ({"tokens": [0]}, "at least 1, got 0"), ({"tokens": [5, 5]}, "different numbers, got 5, 5"), ({"shapes": [7]}, "name or an object, got 7"),
        ({"shapes": [{"E": 4}]}, "missing 3 required"), ({"shapes": [{"E": "4"}]}, "whole number E, got '4'"),
        ({"shapes": [{"E": 4, "topk": 5, "K": 1, "I": 1}]}, "topk=5"),
        ({"shapes": [{"E": 4, "topk": 1, "K": 1, "I": 1, "activation": "mish"}]}, "silu.*'mish'"),
        ({"shapes": [{"model": "olmoe-1b-7b", "E": 65}]}, "E = 64"), ({"shapes": [{"model": "olmoe-1b-7b", "K": 5}]}, "only E"),
        ({"routings": ["random"]}, "zipf.*'random'"), ({"scheme": "int4"}, "bf16.*'int4'"), ({"threads": 0}, "threads"),
        ({"seconds": 0}, "above 0"), ({"routings": ["router"]}, "router of a checkpoint"), ({"contenders": ["fast"]}, "'fast'"),
    ],
)  # fmt: skip
def test_suites_that_are_refused(command, tmp_path, suite, message):
    file = tmp_path / "suite.json"
    good = {"shapes": [{"E": 2, "topk": 1, "K": 8, "I": 8}], "contenders": ["reference"], "baseline": ""}
    file.write_text(suite if isinstance(suite, str) else json.dumps(good | suite))
    status, out, err = command("bench", "--suite", file)
    assert (status, out) == (1, "")
    assert err.startswith("moe-cpu: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_a_forced_isa_that_cannot_run_is_refused_before_anything_is_measured(command, monkeypatch):
    monkeypatch.setattr(isa, "why_not", lambda name: "this CPU has none" if name == "amx" else None)
    got, out, err = command("bench", "--isa", "avx2,amx")
    assert (got, out) == (1, "")
    assert "--isa amx: this CPU has none" in err


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model", "gpt-2"], 1, [*MODELS, "'gpt-2'"]),
        (["--backend", "fast"], 1, [*experts.NAMES, "'fast'"]),
        (["--baseline", "fast"], 1, ["grouped_mm", "vllm", "none", "fast"]),
        (["--isa", "mmx"], 1, ["avx2", "'mmx'"]),
        (["--backend", "reference", "--isa", "avx2"], 1, ["--isa is for the native backend", "reference"]),
        (["--routing", "random"], 1, ["uniform", "'random'"]),
        (["--model", "olmoe-1b-7b", "--experts", "65"], 1, ["E = 64", "65"]),
        (["--model", "olmoe-1b-7b", "--suite", "x.json"], 1, ["one of", "--suite and --model"]),
        (["--suite", "missing.json"], 1, ["missing.json", "cannot be read"]),
        (["--checkpoint", "missing"], 1, ["missing", "config.json"]),
        (["--shape", "4,2,64"], 2, ["E,topk,K,I", "'4,2,64'"]),
        (["--shape", "4,5,64,64"], 2, ["topk <= E"]),
        (["--tokens", "one"], 2, ["whole numbers", "'one'"]),
        (["--fast"], 2, ["--fast"]),
        (["--seconds", "nan"], 1, ["seconds: ", "above 0", "nan"]),
        (["--seconds", "inf", "--random-config", "olmoe-1b-7b"], 1, ["seconds: ", "above 0", "inf"]),
        (["--threads", str(2**40)], 1, ["from 1 to 1024", str(2**40)]),
        (["--threads", "0"], 1, ["from 1 to 1024", "got 0"]),
        (["--threads", "0", "--random-config", "olmoe-1b-7b"], 1, ["from 1 to 1024", "got 0"]),
        (["--seed", str(2**70)], 1, ["seed: ", "2^32 - 1", str(2**70)]),
        (["--json", ""], 2, ["name of a file"]),
        (["--suite="], 2, ["name of a file"]),
        (["--model="], 2, ["names separated by commas"]),
        (["--json", "/dev/null", "--plot", "/dev/null"], 1, ["got /dev/null"]),
        (["--json", "/proc/no.json"], 1, ["/proc/no.json", "can be written"]),
        (["--routing", "zipf-1e308"], 1, ["at most 100", "zipf-1e308"]),
        (["--backend", "native:"], 1, ["native:", "avx2"]),
        (["--layer", "3"], 1, ["--layer", "--checkpoint"]),
        (["--layer", "0", "--overheads"], 1, ["--layer"]),
        (["--layer", "0", "--random-config", "qwen3-30b-a3b"], 1, ["--layer"]),
    ],
)
def test_options_that_are_refused(command, arguments, status, words):
    got, out, err = command("bench", *arguments)
    assert (got, out) == (status, "")
    for word in words:
        assert word in err


def test_too_large_is_refused_with_numbers(command, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1 << 30)
    status, out, err = command("bench", "--model", "kimi-k2", "--tokens", "1")
    assert (status, out) == (1, "")
    assert "weights of one layer 31.50 GiB" in err
    assert "1.00 GiB are available" in err


def test_exit_status_of_a_run(command, monkeypatch):
    assert command(*TINY, "--baseline", "vllm")[0] == 0, "a competitor may be absent"
    add_contender(monkeypatch, lambda y, _: -y)
    status, out, _ = command(*TINY, "--backend", "native", "--baseline", "odd")
    assert status == 0, "or wrong"
    assert "odd wrong at M=1: " in out
    absent = next((b.name for b in experts.list_backends() if not b.available), None)
    if absent is not None:
        status, out, _ = command(*TINY, "--backend", f"native,{absent}", "--baseline", "none")
        assert status == 1, "whoever names a backend wants it to run"
        assert f"{absent} skipped: " in out
    right = backends.Backend.run
    monkeypatch.setattr(backends.Backend, "run", lambda *arguments: right(*arguments) * 2)
    status, out, _ = command(*TINY, "--backend", "native", "--baseline", "none")
    assert status == 1
    assert "native wrong at M=1: " in out


def test_help_and_no_command(command):
    status, out, _ = command("--help")
    assert status == 0
    for name in ("info", "bench", "plot"):
        assert f"    {name} " in out
    status, _, err = command()
    assert status == 2
    assert "COMMAND" in err


def test_as_a_program():
    run = subprocess.run(
        [sys.executable, "-m", "moe_cpu.cli", "bench", "--fast"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert "moe-cpu: error: " in run.stderr
