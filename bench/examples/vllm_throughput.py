"""Tokens per second of vLLM's engine, its own experts beside those of moe_cpu, at prefill and at decode.

python bench/examples/vllm_throughput.py [--model NAME] [--layers N] [--threads N] [--json FILE] ...

The model has the layers of a published one (Qwen3-30B-A3B, if not told otherwise), few of them, a small vocabulary and dummy weights. Two processes hold it, one
with MOE_CPU_VLLM=0, and take turns: in every round each does a prefill and a decode while the other waits. Needs vLLM for CPUs and an installed moe_cpu.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moe_cpu import models
from moe_cpu.benchmark import environment
from moe_cpu.benchmark.end_to_end.random_model import FAMILIES, config_of
from moe_cpu.benchmark.table import aligned, comparison
from moe_cpu.benchmark.timing import compare, summarise

CONTENDERS = {"vllm": "0", "moe_cpu": "1"}  # values of MOE_CPU_VLLM
VOCABULARY = 4096
PHASES = ("prefill", "decode")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=sorted(FAMILIES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, help="fewer experts than the model has")
    parser.add_argument("--prefill", default="4x1024", help="prompts x tokens of each (default 4x1024)")
    parser.add_argument("--decode", default="8x32", help="sequences x new tokens of each (default 8x32)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    parser.add_argument("--json", type=Path, help="write the result there, too")
    parser.add_argument("--logs", type=Path, help="folder for vLLM's logs (default: a temporary one)")
    return parser.parse_args()


def main() -> None:
    o = options()
    shape = models.find(o.model)
    shape = shape.with_experts(o.experts) if o.experts else shape
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(shape, o.layers)
        config.vocab_size = VOCABULARY
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        config.dtype = "bfloat16"
        config.save_pretrained(folder)
        logs = o.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        seconds, calls, vllm = measure(o, folder, logs)
    if calls["vllm"] or not calls["moe_cpu"]:
        sys.exit(
            f"vllm_throughput.py: expected calls of moe_cpu's kernels with the plug-in only, got {calls}"
        )
    report = summary(o, seconds, vllm)
    print(*lines(report), sep="\n")
    if o.json:
        o.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(o: argparse.Namespace, folder: str, logs: Path) -> tuple[dict[str, Any], dict[str, int], str]:
    """Seconds of every turn by phase and contender, calls of our kernels by contender, and vLLM's version."""
    spawn = multiprocessing.get_context("spawn")
    workers, seconds = {}, {phase: {name: [] for name in CONTENDERS} for phase in PHASES}
    for name, switch in CONTENDERS.items():
        mine, theirs = spawn.Pipe()
        # A process inherits these when it starts. All of vLLM is to be in it, so that nothing polls while it waits.
        os.environ.update(
            MOE_CPU_VLLM=switch, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind",
            OMP_NUM_THREADS=str(o.threads),
        )  # fmt: skip
        process = spawn.Process(target=work, args=(theirs, o, folder, logs / f"{name}.log"), daemon=True)
        process.start()
        theirs.close()
        workers[name] = mine
        vllm = answer(mine, name, logs)  # one after the other: loading takes memory
    names = list(CONTENDERS)
    for number in range(o.rounds + 1):  # the first does not count
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            workers[name].send(number)
            took = answer(workers[name], name, logs)
            if number:
                for phase in PHASES:
                    seconds[phase][name].append(took[phase])
    calls = {}
    for name, worker in workers.items():
        worker.send(None)
        calls[name] = answer(worker, name, logs)
    return seconds, calls, vllm


def answer(worker: Connection, name: str, logs: Path) -> Any:
    try:
        return worker.recv()
    except EOFError:
        log = (logs / f"{name}.log").read_text()
        sys.exit(f"{log[-3000:]}\nvllm_throughput.py: the process of {name} ended, with these last words")


def work(parent: Connection, o: argparse.Namespace, folder: str, log: Path) -> None:
    """One contender: answers each round's number with its times, None with the calls of our kernels."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import vllm

    from moe_cpu import ops

    calls, fused_experts = 0, ops.fused_experts

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return fused_experts(*args, **kwargs)

    ops.fused_experts = counted
    (prompts, length), (sequences, new_tokens) = shape_of(o.prefill), shape_of(o.decode)
    engine = vllm.LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=o.eager, enable_prefix_caching=False,
        max_model_len=max(length, 16 + new_tokens) + 2, max_num_seqs=max(prompts, sequences),
        max_num_batched_tokens=max(prompts * length, 2048), kv_cache_memory_bytes=2 << 30,
    )  # fmt: skip
    parent.send(vllm.__version__)

    def generate(number: int, count: int, length: int, new: int) -> float:
        chance = random.Random(number)
        texts = [{"prompt_token_ids": chance.choices(range(VOCABULARY), k=length)} for _ in range(count)]
        wish = vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        engine.generate(texts, wish, use_tqdm=False)
        return time.perf_counter() - start

    while (number := parent.recv()) is not None:
        prefill = generate(number, prompts, length, 1)
        first = generate(number, sequences, 16, 1)
        parent.send({"prefill": prefill, "decode": generate(number, sequences, 16, 1 + new_tokens) - first})
    parent.send(calls)


def shape_of(text: str) -> tuple[int, int]:
    count, _, length = text.partition("x")
    return int(count), int(length)


def summary(o: argparse.Namespace, seconds: dict[str, dict[str, list[float]]], vllm: str) -> dict[str, Any]:
    phases = []
    for phase in PHASES:
        count, length = shape_of(o.prefill if phase == "prefill" else o.decode)
        ratio = compare(seconds[phase]["moe_cpu"], seconds[phase]["vllm"])
        for name in CONTENDERS:
            times = summarise(seconds[phase][name])
            row = {"phase": phase, "experts": name, "tokens": count * length, "seconds": asdict(times)}
            row |= {"tokens_per_second": count * length / times.median}
            row |= {"comparison": asdict(ratio) | {"text": comparison(ratio)}} if name == "moe_cpu" else {}
            phases.append(row)
    asked = {name: value for name, value in vars(o).items() if name not in ("json", "logs")}
    return {
        "kind": "vllm throughput",
        "environment": {**environment.describe(o.threads), "vllm": vllm},
        "options": asked,
        "rows": phases,
    }


def lines(report: dict[str, Any]) -> list[str]:
    e, o = report["environment"], report["options"]
    cells = [["phase", "experts", "tokens/s", "ms", "p10", "p90", "n", "beside vLLM's"]]
    for row in report["rows"]:
        times = row["seconds"]
        spread = [f"{1e3 * times[name]:.4g}" for name in ("median", "p10", "p90")]
        ratio = row["comparison"]["text"] if "comparison" in row else ""
        cells.append(
            [row["phase"], row["experts"], f"{row['tokens_per_second']:.4g}", *spread, str(times["n"]), ratio]
        )
    return [
        f"{e['cpu']}, {e['threads']} threads, best ISA {e['isa']}; vLLM {e['vllm']}, torch {e['torch']}, moe-cpu {e['commit']}",
        f"{o['model']}, {o['layers']} layers, prefill {o['prefill']}, decode {o['decode']}, {'eager' if o['eager'] else 'compiled'}",
        *aligned(cells),
    ]


if __name__ == "__main__":
    main()
