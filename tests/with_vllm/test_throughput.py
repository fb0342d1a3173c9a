"""The example that measures vLLM's engine: it compares what it says it compares, and writes what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("native")
PROGRAM = Path(__file__).parents[2] / "bench" / "examples" / "vllm_throughput.py"


def test_a_tiny_run(tmp_path: Path) -> None:
    sizes = ["--layers", "1", "--experts", "8", "--prefill", "2x32", "--decode", "2x4"]
    done = subprocess.run(
        [sys.executable, PROGRAM, *sizes, "--rounds", "2", "--threads", "1", "--eager", "--json", tmp_path / "out.json", "--logs", tmp_path],
        env={name: value for name, value in os.environ.items() if name != "MOE_CPU_VLLM"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert "experts run on its kernels" in (tmp_path / "moe_cpu.log").read_text()
    assert "experts run on its kernels" not in (tmp_path / "vllm.log").read_text()
    report = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["phase"], row["experts"]): row for row in report["rows"]}
    assert {key: row["tokens"] for key, row in rows.items()} == {
        ("prefill", "vllm"): 64, ("prefill", "moe_cpu"): 64, ("decode", "vllm"): 8, ("decode", "moe_cpu"): 8,
    }  # fmt: skip
    for row in rows.values():
        assert row["seconds"]["n"] == 2
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"]["median"])
        assert f"{row['tokens_per_second']:.4g}" in done.stdout
