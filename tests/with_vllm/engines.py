"""Runs of generate.py in processes of their own, and what their answers have in common."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
NEW_TOKENS = 4
_numbers = random.Random(0)
PROMPTS = [[_numbers.randrange(3, 256) for _ in range(length)] for length in (1, 3, 5, 9, 17, 40) * 4]
# Logits are bf16, of a few units: two right ways of computing differ by a unit in the last place of some of them, up to 0.12 here. Where
# two experts of a layer have each other's w2, or one adds nothing, some answers are 1.4 or more away.
TOLERANCE = 0.25
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def job(model: Path, **options: Any) -> dict[str, Any]:
    """One engine with these options of vLLM's."""
    return {"model": str(model), "prompts": PROMPTS, "new_tokens": NEW_TOKENS, "options": options}


class Run:
    """A process that works off jobs, each with a name, one thread for each of its workers; `results` waits for it."""

    def __init__(self, jobs: dict[str, dict[str, Any]], folder: Path, **environment: str) -> None:
        folder.mkdir(parents=True)
        self.log_file, self._results, self._names = folder / "log.txt", folder / "results.json", list(jobs)
        (folder / "jobs.json").write_text(json.dumps(list(jobs.values())))
        command = [sys.executable, HERE / "generate.py", folder / "jobs.json", self._results]
        self._process = start(command, self.log_file, **environment)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def results(self, seconds: float = 400) -> dict[str, dict[str, Any]]:
        try:
            status = self._process.wait(seconds)
        finally:
            self.stop()
        assert status == 0, self.log[-4000:]
        return dict(zip(self._names, json.loads(self._results.read_text()), strict=True))

    def stop(self) -> None:
        kill(self._process)


def start(command: list[Any], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A process with a group of its own, for vLLM has children, that writes to `log`.

    Engines of several tests share the cores, so vLLM must not bind threads to them.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MOE_CPU_VLLM"}
    ours = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as out:
        return subprocess.Popen(
            command, env={**inherited, **ours, **environment}, stdout=out, stderr=out, start_new_session=True
        )


def kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all its children."""
    with contextlib.suppress(ProcessLookupError):  # none of them is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def check_same(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    """Every token's log probability at every step, and the greedy token wherever `want` prefers it clearly.

    Once tokens part, at a near tie, what follows is another text: of no prompt more is compared then. Most tokens must have been, and clear ones.
    """
    clear = 0
    for prompt, (one, other) in enumerate(zip(got, want, strict=True)):
        for step in range(NEW_TOKENS):
            mine, theirs = (torch.tensor(answer["logprobs"][step]) for answer in (one, other))
            where = f"prompt {prompt}, token {step}"
            assert (mine - theirs).abs().max() <= TOLERANCE, where
            first, second = theirs.topk(2).values
            if first - second > 2 * TOLERANCE:
                clear += 1
                assert one["tokens"][step] == other["tokens"][step], where
            elif one["tokens"][step] != other["tokens"][step]:
                break
    assert clear >= len(want) * NEW_TOKENS // 2, f"{clear} clear tokens"


def differ(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Whether most prompts are answered differently from the first token on, and by far more than rounding."""
    firsts = [
        (torch.tensor(a["logprobs"][0]), torch.tensor(b["logprobs"][0]))
        for a, b in zip(one, other, strict=True)
    ]
    far = sum(bool((a - b).abs().max() > 4 * TOLERANCE) for a, b in firsts)
    tokens = sum(bool(a.argmax() != b.argmax()) for a, b in firsts)
    return far > len(firsts) // 2 and tokens > len(firsts) // 2
