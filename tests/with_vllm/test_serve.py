"""`vllm serve`, a program that knows nothing of us, and a client."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from engines import HERE, TOLERANCE, kill, start
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.usefixtures("native")
STARTUP_SECONDS = 300
NEW_TOKENS = 6


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path, Path]]:
    """Address, model and log of a server that is ready; it and all its children are killed afterwards."""
    model, log = checkpoints.save("qwen3", tmp_path), tmp_path / "log.txt"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, HERE / "vllm_command.py", "serve", model, "--host", "127.0.0.1", "--port", str(port), "--enforce-eager",
        "--max-model-len", "128", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    process = start(command, log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(process, address, log)
        yield address, model, log
    finally:
        kill(process)


def wait_until_ready(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + STARTUP_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        time.sleep(0.5)
    pytest.fail(f"not ready after {STARTUP_SECONDS} s: {log.read_text()[-4000:]}")


def complete(address: str, **request: Any) -> dict[str, Any]:
    body = json.dumps(request).encode()
    post = urllib.request.Request(
        f"{address}/v1/completions", body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(post, timeout=120) as answer:
        return json.load(answer)


def test_a_completion(server: tuple[str, Path, Path]) -> None:
    address, model, log = server
    prompt = "Once upon a time"
    answer = complete(
        address, model=str(model), prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True,
        logprobs=1, return_token_ids=True,
    )  # fmt: skip
    (choice,) = answer["choices"]
    assert answer["usage"]["completion_tokens"] == NEW_TOKENS
    check_greedy(model, prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])
    assert re.search(
        r"moe_cpu: bf16 silu experts run on its kernels \(\w+\) instead of vLLM's", log.read_text()
    )


def check_greedy(model: Path, prompt: str, tokens: list[int], logprobs: list[float]) -> None:
    """Each token is one that transformers' float32 model, given those before, holds for the likeliest or nearly so, with the same probability."""
    ids = AutoTokenizer.from_pretrained(model)(prompt)["input_ids"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        want = network(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    for step, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        assert abs(want[step, token] - logprob) <= TOLERANCE
        assert want[step, token] >= want[step].max() - 2 * TOLERANCE
