"""Whole models by the command line: times, agreement, memory, what is refused; on tiny random models."""

from __future__ import annotations

import json
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from moe_cpu import isa  # noqa: E402
from moe_cpu.benchmark import environment, memory  # noqa: E402
from moe_cpu.benchmark.end_to_end import (  # noqa: E402
    high_water,
    load_and_pack,
    random_model,
    runner,
)
from moe_cpu.benchmark.end_to_end.high_water import Bytes  # noqa: E402
from moe_cpu.benchmark.end_to_end.report import EndToEndReport, Released  # noqa: E402
from moe_cpu.benchmark.end_to_end.settings import ModelSource, Settings  # noqa: E402
from moe_cpu.cli import main  # noqa: E402
from moe_cpu.errors import BackendUnavailable  # noqa: E402
from moe_cpu.integrations.transformers import detect, forward  # noqa: E402
from moe_cpu.integrations.transformers.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.skipif(not isa.available(), reason="no kernel runs here")
QUICK = ["--prompt-tokens", "9", "--new-tokens", "3", "--seconds", "0.01", "--threads", "1"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch, set_threads):
    monkeypatch.setattr(environment, "_brand_by_cpuinfo", lambda: None)
    set_threads(1)


@pytest.fixture
def no_child(monkeypatch):
    """Leaves the process out that measures loading and packing."""
    monkeypatch.setattr(
        load_and_pack, "measure", lambda _: Released(*([Bytes(2, 1)] * 5), True, taken=2, left=0)
    )


@pytest.fixture
def command(capsys):
    """Runs ``bench``: exit status, standard output, standard error."""

    def run(*arguments):
        try:
            status = main(["bench", *map(str, arguments)])
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of the tiny Qwen3-MoE."""
    family = next(f for f in FAMILIES if f.name == "Qwen3-MoE")
    path = tmp_path_factory.mktemp("qwen3")
    family.build(torch.bfloat16).save_pretrained(path)
    return path


def test_a_checkpoint_from_command_line_to_files(command, folder, tmp_path):
    pytest.importorskip("matplotlib")
    results, picture = tmp_path / "r.json", tmp_path / "p.png"
    status, out, err = command(
        "--model-dir", folder, "--batch", "1,2", *QUICK, "--json", results, "--plot", picture
    )
    assert status == 0, err
    assert err == ""
    for word in ("Qwen3MoeForCausalLM", "prefill", "decode", "experts %", "model against first", "grouped_mm", "tokens/s", "planned", "load", "pack",
                 "greedy tokens equal", "time to the first token", "1 threads", "weights may have come from there"):  # fmt: skip
        assert word in out
    data = json.loads(results.read_text())
    assert (data["kind"], data["schema"]) == ("end_to_end", 1)
    report = EndToEndReport.load(results)
    assert json.loads(json.dumps(report.to_dict())) == data
    assert report.environment["transformers"] == transformers.__version__
    assert [(p.batch, p.implementation, p.status) for p in report.points] == [
        (batch, name, "ok") for batch in (1, 2) for name in ("grouped_mm", "moe_cpu")
    ]
    for point in report.points:
        prefill, decode = point.phases
        assert (prefill.tokens, decode.tokens) == (9 * point.batch, point.batch)
        assert decode.whole.n == 3 * prefill.whole.n
        for phase in point.phases:
            assert 0 < phase.experts.median < phase.whole.median
            assert 0 < phase.experts_share < 1
            assert phase.tokens_per_second == phase.tokens / phase.whole.median
            assert (phase.whole_comparison is None) == (point.implementation == "grouped_mm")
        if point.implementation == "moe_cpu":
            assert 0 <= point.agreement.distance <= point.agreement.bound
            assert point.agreement.tokens == 4 * point.batch
            assert 0 <= point.agreement.equal_tokens <= point.agreement.tokens
            assert point.agreement.equal_choices > 0
    released = report.released
    assert (released.taken, released.left) == (2, 0)
    assert 0 < released.before.anonymous < released.before.resident < released.load.resident
    assert released.separate == high_water.reset()
    assert report.both_layouts > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.svg"
    assert main(["plot", str(results), str(again)]) == 0
    assert "<svg" in again.read_text()


def test_random_weights_of_a_published_model_from_the_command_line(command, no_child, tmp_path, monkeypatch):
    """The real sizes but for their number; a vocabulary of its own, for head and embedding are most of so small a model."""
    family = random_model.FAMILIES["olmoe-1b-7b"]
    monkeypatch.setitem(
        random_model.FAMILIES, "olmoe-1b-7b", family._replace(rest={**family.rest, "vocab_size": 300})
    )
    results = tmp_path / "r.json"
    status, out, err = command(
        "--random-config", "OLMoE-1B-7B", "--layers", 1, "--experts", 8, "--batch", 1, "--implementations", "eager,grouped_mm,moe_cpu",
        *QUICK, "--json", results,
    )  # fmt: skip
    assert status == 0, err
    assert "weights are random" in out
    assert "1 of 16 layers: beside them, embedding and head weigh 16 times as much" in out
    model = EndToEndReport.load(results).model
    assert (model["layers"], model["experts_layers"], model["E"], model["topk"]) == (1, 1, 8, 8)
    assert model["experts_bytes"] == 8 * 3 * 2048 * 1024 * 2
    assert "moe_cpu beside eager" in out


@pytest.mark.usefixtures("no_child")
def test_a_wrong_implementation_gets_no_times(command, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(forward, "plan_of", lambda _: detect.Plan("gelu"))
    results = tmp_path / "r.json"
    status, out, _ = command("--model-dir", folder, "--batch", 2, *QUICK, "--json", results)
    assert status == 1
    assert "moe_cpu wrong at batch 2: after the prompt its logits are " in out
    first, ours = EndToEndReport.load(results).points
    assert (first.status, ours.status, ours.phases) == ("ok", "wrong", [])


@pytest.mark.usefixtures("no_child")
def test_an_implementation_that_raises_is_reported(command, folder, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(forward, "run_stored", fail)
    status, out, _ = command("--model-dir", folder, "--batch", 1, *QUICK)
    assert status == 1
    assert "moe_cpu failed at batch 1: ZeroDivisionError: on purpose" in out
    status, _, err = command("--model-dir", folder, "--implementations", "moe_cpu", "--batch", 1, *QUICK)
    assert status == 1
    assert "moe_cpu, the implementation that others are compared with, failed: ZeroDivisionError" in err


@pytest.mark.usefixtures("no_child")
def test_layers_left_to_the_reference_path_are_named(command, folder, monkeypatch):
    monkeypatch.setattr(detect, "_CLASSES", {})
    with pytest.warns(UserWarning, match="reference path"):
        status, out, _ = command("--model-dir", folder, "--batch", 1, *QUICK)
    assert status == 0
    assert "moe_cpu runs 2 of 2 experts layers on its reference path: its activation" in out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--model-dir", "missing"], 1, ["folder with a config.json", "missing"]),
        (["--random-config", "gpt-2"], 1, ["qwen3-30b-a3b", "'gpt-2'"]),
        (["--random-config", "deepseek-v3"], 1, ["olmoe-1b-7b", "'deepseek-v3'"]),
        (["--random-config", "olmoe-1b-7b", "--model-dir", "x"], 1, ["either --model-dir or --random-config"]),
        (["--prompt-tokens", "5"], 1, ["either --model-dir or --random-config"]),
        (["--model-dir", "x", "--layers", "2"], 1, ["--layers", "checkpoint"]),
        (["--model-dir", "x", "--tokens", "5", "--isa", "avx2"], 1, ["--tokens and --isa", "layer"]),
        (["--random-config", "olmoe-1b-7b", "--layers", "0"], 1, ["at least 1, got 0"]),
        (["--random-config", "olmoe-1b-7b", "--batch", "2,2"], 1, ["batch: expected different numbers"]),
        (["--random-config", "olmoe-1b-7b", "--experts", "65"], 1, ["E = 64", "65"]),
        (["--random-config", "olmoe-1b-7b", "--batch", "1,0"], 1, ["batch: ", "got 0"]),
        (["--random-config", "olmoe-1b-7b", "--new-tokens", "0"], 1, ["new-tokens: ", "got 0"]),
        (["--random-config", "olmoe-1b-7b", "--seconds", "0"], 1, ["seconds", "above 0"]),
        (["--random-config", "olmoe-1b-7b", "--implementations", "fast"], 1, ["grouped_mm", "moe_cpu", "fast"]),
        (["--random-config", "olmoe-1b-7b", "--implementations", "eager,eager"], 1, ["different names"]),
        (["--random-config", "olmoe-1b-7b", "--json", "/nowhere/r.json"], 1, ["/nowhere/r.json", "folder"]),
        (["--random-config", "olmoe-1b-7b", "--batch", "one"], 2, ["whole numbers", "'one'"]),
    ],
)  # fmt: skip
def test_options_that_are_refused(command, arguments, status, words):
    got, out, err = command(*arguments)
    assert (got, out) == (status, "")
    for word in words:
        assert word in err


def test_folders_that_are_refused(command, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "cannot read" in command("--model-dir", tmp_path)[2]
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert "LlamaForCausalLM has none" in command("--model-dir", tmp_path)[2]
    transformers.Qwen3MoeConfig(num_hidden_layers=1, num_experts=8).save_pretrained(tmp_path)
    status, out, err = command("--model-dir", tmp_path, "--implementations", "eager", *QUICK)
    assert (status, out) == (1, "")
    assert f"transformers cannot load {tmp_path}" in err


def test_a_missing_library_is_named_before_anything_is_measured(command, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("it measured"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "moe-cpu[plot]" in command("--random-config", "olmoe-1b-7b", "--plot", "p.png")[2]
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "moe-cpu[transformers]" in command("--random-config", "olmoe-1b-7b")[2]


def test_too_large_is_refused_with_numbers(command, monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 40 << 30)
    monkeypatch.setattr(load_and_pack, "measure", lambda _: pytest.fail("it took memory"))
    status, out, err = command("--random-config", "qwen3-30b-a3b")
    assert (status, out) == (1, "")
    assert "dense weights 56.87 GiB, packed weights 54.00 GiB" in err
    assert "40.00 GiB are available" in err


def test_times_are_shown_when_the_process_for_memory_fails(command, folder, monkeypatch):
    def fail(_):
        raise BackendUnavailable("it was killed")

    monkeypatch.setattr(load_and_pack, "measure", fail)
    status, out, _ = command("--model-dir", folder, "--batch", 1, *QUICK)
    assert status == 1
    assert "note: memory of loading and packing was not measured: it was killed" in out
    assert "model against first" in out


def test_a_failing_process_says_its_last_words(tmp_path):
    with pytest.raises(BackendUnavailable, match=r"status 1: .*ArgumentError.*config\.json"):
        load_and_pack.measure(Settings(ModelSource(folder=str(tmp_path))))
