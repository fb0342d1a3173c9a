"""Whole models in vLLM's engine: the same greedy tokens as stock vLLM, eager, compiled, after weights are loaded anew, and on two ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from engines import NEW_TOKENS, ONE_PROCESS, Run, check_same, differ, job

pytestmark = pytest.mark.usefixtures("native")
FAMILIES = tuple(checkpoints.CONFIGS)
# Not gpt_oss, whose parameters vLLM fills past their loaders: its own reloading leaves these experts out as well.
RELOADED = ("qwen3", "mixtral")
COMPILED = ("qwen3", "gpt_oss")  # without and with biases
ACTIVATION = {"qwen3": "silu", "mixtral": "silu", "gpt_oss": "swigluoai"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Iterator[dict[str, Run]]:
    """Stock vLLM and ours, and ours on two ranks with half of the experts each, at the same time."""
    models = {family: checkpoints.save(family, folder) for family in FAMILIES}
    others = {family: checkpoints.save(family, folder, other_experts=True) for family in RELOADED}
    stock = {family: job(models[family], enforce_eager=True) for family in FAMILIES}
    stock |= {f"{family}, other experts": job(path, enforce_eager=True) for family, path in others.items()}
    ours = {family: job(models[family], enforce_eager=True) for family in FAMILIES}
    for family, path in others.items():
        ours[family]["reload"] = str(path)
    ours |= {f"{family}, compiled": job(models[family]) for family in COMPILED}
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    started = {
        "stock": Run(stock, folder / "stock", MOE_CPU_VLLM="0", **ONE_PROCESS),
        "ours": Run(ours, folder / "ours", MOE_CPU_VLLM="1", **ONE_PROCESS),
        "two ranks": Run({"qwen3": job(models["qwen3"], enforce_eager=True, **ranks)}, folder / "two"),
    }
    yield started
    for run in started.values():
        run.stop()


@pytest.fixture(scope="module")
def results(runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    return {who: run.results() for who, run in runs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_stock_vllm(results, family):
    ours = results["ours"][family]
    check_same(ours["rounds"][0], results["stock"][family]["rounds"][0])
    assert ours["in_graphs"] == 0


@pytest.mark.parametrize("family", COMPILED)
def test_tokens_of_a_compiled_model(results, family):
    ours = results["ours"][f"{family}, compiled"]
    check_same(ours["rounds"][0], results["stock"][family]["rounds"][0])
    assert ours["in_graphs"] > 0
    assert ours["in_graphs"] % checkpoints.LAYERS == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_our_kernels_ran_and_the_log_says_so(runs, results, family):
    line = f"moe_cpu: bf16 {ACTIVATION[family]} experts run on its kernels"
    assert line in runs["ours"].log
    assert line not in runs["stock"].log
    for job_name in {family, f"{family}, compiled"} & results["ours"].keys():
        assert results["ours"][job_name]["native_calls"] >= checkpoints.LAYERS * NEW_TOKENS
    assert results["stock"][family]["native_calls"] == 0


def test_two_ranks_say_what_one_says(runs, results):
    """Stock vLLM reads past its weights here and dies."""
    check_same(results["two ranks"]["qwen3"]["rounds"][0], results["ours"]["qwen3"]["rounds"][0])
    log = runs["two ranks"].log
    assert re.search(r"Worker_TP0_EP0.*moe_cpu: bf16 silu experts run on its kernels", log)
    assert "Worker_TP1_EP1" in log


@pytest.mark.parametrize("family", RELOADED)
def test_other_weights_of_experts_loaded_into_a_running_engine(results, family):
    before, after = results["ours"][family]["rounds"]
    check_same(after, results["stock"][f"{family}, other experts"]["rounds"][0])
    assert differ(before, after)
