"""Two ranks, each with half of the experts, in vLLM's engine. (Stock vLLM reads past its weights there and dies.)"""

from __future__ import annotations

import re
from pathlib import Path

import checkpoints
import pytest
from engines import ONE_PROCESS, Run, check_same, job

pytestmark = pytest.mark.usefixtures("native")


def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    model = checkpoints.save("qwen3", tmp_path)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    two = Run({"two": job(model, enforce_eager=True, **options)}, tmp_path / "two")
    one = Run({"one": job(model, enforce_eager=True)}, tmp_path / "one", **ONE_PROCESS)
    try:
        check_same(two.results()["two"]["rounds"][0], one.results()["one"]["rounds"][0])
    finally:
        two.stop()
        one.stop()
    assert re.search(r"Worker_TP0_EP0.*moe_cpu: bf16 silu experts run on its kernels", two.log)
    assert "Worker_TP1_EP1" in two.log
