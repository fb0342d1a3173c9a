"""Trains the model of this folder from nothing.

    python bench/tiny-qwen3-moe/train.py --out DIR [--device cuda] [--minutes 1.5]

Writes into DIR the checkpoint as transformers does (config.json, generation_config.json, model.safetensors in bf16, the tokenizer's files), loss.json with
everything that the run measured, and loss.png where matplotlib is installed.

The model computes in bf16; the optimizer keeps a float32 copy of each weight and rounds it to bf16 after every step. The learning rate falls along a cosine
to zero over the steps that `--minutes` leave room for, judged by the first ones. What is kept is the model of the lowest loss on held-out documents.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

import corpus
import tokenizers
import torch
import transformers
from evaluate import EVAL_TEXT, continuation, load, text_loss
from model import CONTEXT, config, encode, expert_counts, nll, train_tokenizer
from plot import draw
from torch import Tensor
from tqdm import tqdm
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

PEAK_RATE, WARMUP, DECAY, CLIP = 2e-3, 100, 0.1, 1.0
# Steps after which a rate is known: the first ones wait for compilers and allocators.
SETTLED, TIMED = 10, 40
# Windows of held-out text that are looked at, at most.
HELD_OUT_WINDOWS = 256
PROMPTS = (
    "A list is a sequence of",
    "Return the number of",
    "If the file does not exist,",
    "The first argument is",
    "This function returns a new",
)


class Windows:
    """Documents as one line of tokens in random order; `[count, length]` windows of it."""

    def __init__(self, tokenizer: Any, documents: list[corpus.Document], seed: int, device: str) -> None:
        documents = random.Random(seed).sample(documents, len(documents))
        rows = tokenizer([d.text for d in documents], add_special_tokens=False, verbose=False)["input_ids"]
        line = [token for row in rows for token in (tokenizer.bos_token_id, *row)]
        self.tokens = torch.tensor(line, device=device)
        self.bytes_per_token = sum(len(d.text.encode()) for d in documents) / len(line)
        self._rng = torch.Generator().manual_seed(seed)

    def draw(self, count: int, length: int) -> Tensor:
        starts = torch.randint(len(self.tokens) - length + 1, (count,), generator=self._rng)
        return self._at(starts, length)

    def in_order(self, length: int, most: int) -> Tensor:
        count = min(len(self.tokens) // length, most)
        return self._at(torch.arange(count) * length, length)

    def _at(self, starts: Tensor, length: int) -> Tensor:
        starts = starts.to(self.tokens.device, non_blocking=True)
        return self.tokens[starts[:, None] + torch.arange(length, device=starts.device)]


class MixedAdamW:
    """AdamW on float32 copies of a bf16 model's weights; norms do not decay."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [w.detach().float() for w in self.weights]
        groups = [
            {"params": [m for m in self.masters if m.ndim > 1], "weight_decay": DECAY},
            {"params": [m for m in self.masters if m.ndim == 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, CLIP)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        torch._foreach_copy_(self.weights, self.masters)


class Schedule:
    """Rates of a run whose length is known once its first steps have been timed."""

    def __init__(self, steps: int, minutes: float | None) -> None:
        self.steps, self._seconds = steps, None if minutes is None else 60 * minutes
        self._start = self._settled = time.perf_counter()

    def rate(self, step: int) -> float:
        if self._seconds is not None and step in (SETTLED, TIMED):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if step == SETTLED:
                self._settled = now
            else:
                each = (now - self._settled) / (TIMED - SETTLED)
                left = self._seconds - (now - self._start)
                self.steps = max(TIMED, min(self.steps, TIMED + int(left / each)))
        warmup = min(WARMUP, max(1, self.steps // 10))
        if step < warmup:
            return PEAK_RATE * (step + 1) / warmup
        return PEAK_RATE * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))) / 2


def balance(router_logits: tuple[Tensor, ...], cfg: Any) -> Tensor:
    """The Switch Transformer's loss, topk for a balanced router. Layer by layer: taken over all of them at once, one layer's idle expert makes up for another's
    busy one of the same number."""
    each = [
        load_balancing_loss_func((logits.float(),), cfg.num_experts, cfg.num_experts_per_tok)
        for logits in router_logits
    ]
    return torch.stack(each).mean()


@torch.no_grad()
def held_out_loss(model: Any, windows: Tensor, batch: int) -> float:
    model.eval()
    losses = [nll(model(part).logits, part) * len(part) for part in windows.split(batch)]
    model.train()
    return float(torch.stack(losses).sum() / len(windows))


def fit(
    model: Any, training: Windows, held_out: Tensor, args: argparse.Namespace
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The best weights, and the curves."""
    optimizer, schedule = MixedAdamW(model), Schedule(args.steps, args.minutes)
    best, best_loss, best_step = {}, math.inf, 0
    curve: list[dict[str, float]] = []
    held: list[dict[str, float]] = []
    sums = torch.zeros(2, device=args.device)
    start, step, since = time.perf_counter(), 0, 0
    with tqdm(total=schedule.steps, desc="training", unit="step", disable=None) as bar:
        while step < schedule.steps:
            rate = schedule.rate(step)
            tokens = training.draw(args.batch, args.length)
            output = model(tokens, output_router_logits=True)
            loss, aux = nll(output.logits, tokens), balance(output.router_logits, model.config)
            (loss + model.config.router_aux_loss_coef * aux).backward()
            optimizer.step(rate)
            sums += torch.stack([loss.detach(), aux.detach()])
            step, since = step + 1, since + 1
            bar.total = schedule.steps
            bar.update()
            last = step == schedule.steps
            if step % args.log == 0 or last:
                mean = (sums / since).tolist()
                curve.append({"step": step, "loss": mean[0], "balance": mean[1], "rate": rate})
                sums.zero_()
                since = 0
                tqdm.write(
                    f"step {step}/{schedule.steps}  loss {mean[0]:.4f}  balance {mean[1]:.3f}  {time.perf_counter() - start:.0f} s"
                )
            if step % (5 * args.log) == 0 or last:
                held.append({"step": step, "loss": held_out_loss(model, held_out, args.batch)})
                tqdm.write(f"step {step}  held-out loss {held[-1]['loss']:.4f}")
                if held[-1]["loss"] < best_loss:
                    best_loss, best_step = held[-1]["loss"], step
                    best = {name: value.clone() for name, value in model.state_dict().items()}
    facts = {
        "steps": schedule.steps, "kept_step": best_step, "seconds": round(time.perf_counter() - start, 1), "batch": args.batch,
        "length": args.length, "tokens": schedule.steps * args.batch * args.length, "peak_rate": PEAK_RATE, "warmup": WARMUP, "weight_decay": DECAY,
        "balance_coefficient": model.config.router_aux_loss_coef, "curve": curve, "held_out_curve": held,
    }  # fmt: skip
    return best, facts


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """As transformers does, in words that its earlier releases and other engines know, too."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    experts = model.config.num_experts
    for file, known_words in (
        ("config.json", {"num_experts": experts, "num_local_experts": experts}),
        ("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        values = json.loads((folder / file).read_text()) | known_words
        (folder / file).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    (folder / "model.safetensors").chmod(0o644)  # readable by whoever may read the folder


def versions(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__, "device": name,
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, made if missing")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=4000, help="at most this many (default: %(default)s)")
    parser.add_argument("--minutes", type=float, help="take as many steps as fit into this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32, help="windows of a step (default: %(default)s)")
    parser.add_argument(
        "--length", type=int, default=CONTEXT, help="tokens of a window (default: %(default)s)"
    )
    parser.add_argument("--bytes", type=int, help="read only so much of each source of text; for a trial")
    parser.add_argument("--log", type=int, default=50, help="steps between two lines (default: %(default)s)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; pass --device cpu")
    if args.steps < 1 or args.batch < 1 or args.log < 1 or not 2 <= args.length <= CONTEXT:
        parser.error(f"--steps, --batch and --log: at least 1; --length: from 2 to {CONTEXT}")
    return args


def main() -> None:
    args, start = parse(), time.perf_counter()
    torch.manual_seed(args.seed)
    text = corpus.collect(args.bytes)
    tokenizer = train_tokenizer(d.text for d in text.training)
    training = Windows(tokenizer, text.training, args.seed, args.device)
    unseen = Windows(tokenizer, text.held_out, args.seed, args.device)
    held_out = unseen.in_order(args.length, HELD_OUT_WINDOWS)
    tqdm.write(
        f"{sum(s['bytes'] for s in text.sources) / 1e6:.1f} MB of text, {len(training.tokens)} tokens to train on, "
        f"{held_out.numel()} held out, {training.bytes_per_token:.2f} bytes a token, after {time.perf_counter() - start:.0f} s"
    )
    model = Qwen3MoeForCausalLM(config()).to(args.device, torch.bfloat16).train()
    best, facts = fit(model, training, held_out, args)
    if not best:
        raise SystemExit("training diverged: no held-out loss was finite; nothing was written")
    model.load_state_dict(best)
    with expert_counts(model) as counts:
        loss = held_out_loss(model, held_out, args.batch)
    save(model, tokenizer, args.out)

    # What users will do: load the files on a CPU, in float32.
    model, tokenizer = load(args.out, torch.float32)
    written = EVAL_TEXT.read_text()
    per_byte = encode(tokenizer, written).shape[1] / len(written.encode())
    eval_loss = text_loss(model, tokenizer, written)
    report = {
        "seed": args.seed,
        "versions": versions(args.device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sources": text.sources,
        "documents": {"training": len(text.training), "held_out": len(text.held_out)},
        "training": facts,
        "held_out": {
            "tokens": held_out.numel(),
            "loss": loss,
            "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) / unseen.bytes_per_token,
        },
        "eval_text": {
            "file": EVAL_TEXT.name,
            "loss": eval_loss,
            "perplexity": math.exp(eval_loss),
            "bits_per_byte": eval_loss * per_byte / math.log(2),
        },
        "expert_share": [[round(c / sum(row), 4) for c in row] for row in counts.tolist()],
        "samples": [{"prompt": prompt, "text": continuation(model, tokenizer, prompt)} for prompt in PROMPTS],
        "seconds": round(time.perf_counter() - start, 1),
    }
    (args.out / "loss.json").write_text(json.dumps(report, indent=1) + "\n")
    try:
        draw(report, args.out / "loss.png")
    except ImportError:
        tqdm.write(f"no matplotlib here; draw the curve elsewhere: plot.py {args.out / 'loss.json'} loss.png")
    tqdm.write(
        json.dumps(
            {key: report[key] for key in ("held_out", "eval_text", "expert_share", "samples", "seconds")},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
