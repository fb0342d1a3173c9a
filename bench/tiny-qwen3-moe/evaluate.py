"""Perplexity and a sample of the model of this folder, by transformers' own experts and by moe_cpu's, as a table in Markdown.

python bench/tiny-qwen3-moe/evaluate.py [FOLDER]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from model import CONTEXT, encode, nll
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path(__file__).resolve().parent
EVAL_TEXT = FOLDER / "eval.txt"
PROMPT = "A list is a sequence of"


def load(folder: Path, dtype: torch.dtype, implementation: str = "eager") -> tuple[Any, Any]:
    """Model and tokenizer from files, on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation=implementation)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def text_loss(model: Any, tokenizer: Any, text: str) -> float:
    """Mean -log p per token, in nats; exp of it is the perplexity."""
    tokens = encode(tokenizer, text)
    if tokens.shape[1] > CONTEXT:
        raise ValueError(f"text: expected at most {CONTEXT} tokens, got {tokens.shape[1]}; shorten it")
    return float(nll(model(tokens).logits, tokens))


@torch.no_grad()
def continuation(model: Any, tokenizer: Any, prompt: str, new_tokens: int = 60) -> str:
    """Greedy continuation of a prompt, the prompt left out."""
    tokens = encode(tokenizer, prompt)
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True)


def table(folder: Path) -> str:
    """A row for each implementation and precision."""
    import moe_cpu.integrations.transformers as integration

    text = EVAL_TEXT.read_text()
    lines = ["| experts | dtype | perplexity per token | bits per byte |", "|---|---|---|---|"]
    for dtype in (torch.float32, torch.bfloat16):
        for implementation in ("eager", integration.NAME):
            model, tokenizer = load(folder, dtype, implementation)
            loss = text_loss(model, tokenizer, text)
            bits = loss * encode(tokenizer, text).shape[1] / len(text.encode()) / math.log(2)
            name = str(dtype).removeprefix("torch.")
            lines.append(f"| {implementation} | {name} | {math.exp(loss):.4f} | {bits:.4f} |")
    sample = continuation(model, tokenizer, PROMPT)
    lines += ["", f"In bf16 by {integration.NAME}, greedily, after “{PROMPT}”:", ""]
    return "\n".join([*lines, *(f"> {line}".rstrip() for line in (PROMPT + sample).splitlines())])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, default=FOLDER, help="of a checkpoint (default: this one)"
    )
    print(table(parser.parse_args().folder))
