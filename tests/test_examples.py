"""The examples run, from a folder to text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers_models import BY_NAME, kernels  # noqa: E402

ROOT = Path(__file__).parents[1]
GENERATE = ROOT / "bench" / "examples" / "generate.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, GENERATE, *map(str, arguments)], env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-MoE whose tokens are the 256 bytes."""
    path = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    family = BY_NAME["Qwen3-MoE"]
    replace(family, options={**family.options, "vocab_size": 256}).build(torch.bfloat16).save_pretrained(path)
    return path


@kernels
def test_generate_packs_every_layer_and_goes_on_with_the_prompt(folder: Path) -> None:
    done = run(folder, "--prompt", "Once upon a time", "--new-tokens", 12)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once upon a time")
    assert len(done.stdout) > len("Once upon a time\n")
    assert re.search(r"packed 2 of 2 experts layers, .* released 0\.[1-9] MiB of dense weights", done.stderr)
    made, seconds, rate = re.search(r"(\d+) tokens in ([\d.]+) s, ([\d.]+) tokens/s", done.stderr).groups()
    assert int(made) == 12
    assert float(rate) == pytest.approx(12 / float(seconds), rel=0.05)
    assert run(folder, "--prompt", "Once upon a time", "--new-tokens", 12).stdout == done.stdout


def test_generate_says_what_is_missing(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        f"generate.py: expected a checkpoint, but {tmp_path} has no config.json; name a folder that has\n"
    )
