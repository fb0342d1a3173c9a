"""Generates text with a Mixture-of-Experts model of transformers on the CPU, its experts run by moe_cpu.

python bench/examples/generate.py [FOLDER] [--prompt TEXT] [--new-tokens N]

FOLDER holds a checkpoint and its tokenizer, as `save_pretrained` or a download leaves them; without one it is the small model of this repository.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

try:
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
except ModuleNotFoundError:
    sys.exit("generate.py: needs transformers, which is not installed; pip install '.[transformers]'")

import moe_cpu.integrations.transformers as moe

SMALL_MODEL = Path(__file__).resolve().parents[1] / "tiny-qwen3-moe"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=SMALL_MODEL)
    parser.add_argument("--prompt", default="A list is a sequence of")
    parser.add_argument("--new-tokens", type=int, default=60)
    options = parser.parse_args()
    if not (options.folder / "config.json").is_file():
        sys.exit(
            f"generate.py: expected a checkpoint, but {options.folder} has no config.json; name a folder that has"
        )

    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    # bf16, because that is what the kernels take: a float32 model would run on the reference path.
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, experts_implementation=moe.NAME
    ).eval()

    # Layer by layer, each giving its dense weights up: memory never holds more than the model and one layer twice.
    report = moe.pack(model, release=True)
    print(report, file=sys.stderr)

    prompt = tokenizer(options.prompt, return_tensors="pt")
    start = time.perf_counter()
    out = model.generate(
        **prompt,
        max_new_tokens=options.new_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer),  # prints words as they come
    )
    seconds = time.perf_counter() - start
    made = out.shape[1] - prompt["input_ids"].shape[1]
    print(f"{made} tokens in {seconds:.3g} s, {made / seconds:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    main()
