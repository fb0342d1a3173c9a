"""Finds launches for a GPU: ``python -m moe_cpu.experts.triton_tune --model mixtral-8x7b,qwen3-30b-a3b --tokens 1,64,4096``.

For each shape and number of tokens, and each number of rows of a block that makes sense for it, every candidate of the first GEMM is tried beside the table's
second GEMM, then every candidate of the second beside the best first. Times are medians of CUDA graph replays with fresh routing on two layers of weights in
turn, so what is compared is the GPU's time alone. The last line of a shape is what `triton_launch.TABLE` would say.

Candidates are compiled beforehand by several processes (``--jobs``), which leave them in Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from moe_cpu.experts import triton_layer
from moe_cpu.experts.triton_launch import Launch, Plan, plan_for
from moe_cpu.experts.triton_scratch import DeviceScratch
from moe_cpu.models import ModelShape, find

# Rows of a block -> launches worth trying for the first and for the second GEMM.
# fmt: off
CANDIDATES: dict[int, tuple[tuple[Launch, ...], tuple[Launch, ...]]] = {
    16: (
        (Launch(32, 128, 4, 4), Launch(64, 128, 4, 3), Launch(32, 256, 4, 3), Launch(64, 64, 4, 5), Launch(32, 64, 4, 6),
         Launch(32, 128, 4, 5, 8, True), Launch(64, 128, 4, 3, 8, True), Launch(64, 64, 4, 5, 8, True)),
        (Launch(64, 128, 4, 4), Launch(32, 128, 4, 4), Launch(32, 256, 4, 4), Launch(128, 64, 4, 4), Launch(64, 64, 4, 6),
         Launch(64, 128, 4, 4, 8, True), Launch(128, 64, 4, 5, 8, True), Launch(128, 128, 4, 3, 8, True)),
    ),
    32: (
        (Launch(64, 128, 4, 3), Launch(64, 64, 4, 4), Launch(32, 128, 4, 4), Launch(64, 128, 4, 3, 8, True), Launch(64, 64, 4, 5, 8, True)),
        (Launch(64, 128, 4, 4), Launch(128, 64, 4, 4), Launch(128, 64, 4, 5, 8, True), Launch(128, 128, 4, 3, 8, True)),
    ),
    64: (
        (Launch(64, 64, 4, 4), Launch(128, 64, 4, 4), Launch(128, 64, 8, 4), Launch(64, 64, 4, 4, 8, True), Launch(128, 64, 4, 4, 8, True),
         Launch(64, 128, 4, 3, 8, True)),
        (Launch(128, 64, 4, 4), Launch(256, 64, 8, 4), Launch(128, 128, 4, 3), Launch(128, 64, 4, 5, 8, True), Launch(256, 64, 4, 4, 8, True),
         Launch(128, 128, 4, 3, 8, True)),
    ),
    128: (
        (Launch(128, 64, 8, 4), Launch(128, 64, 8, 3), Launch(128, 64, 8, 4, 16), Launch(128, 64, 8, 4, 8, True), Launch(128, 64, 8, 3, 8, True),
         Launch(128, 64, 8, 4, 32, True), Launch(64, 64, 4, 4, 8, True), Launch(64, 64, 8, 4, 8, True)),
        (Launch(256, 64, 8, 4), Launch(256, 64, 8, 3), Launch(256, 64, 8, 4, 8, True), Launch(256, 64, 8, 3, 16, True), Launch(128, 64, 8, 4, 8, True),
         Launch(128, 64, 4, 4, 8, True)),
    ),
    256: (
        (Launch(64, 64, 8, 4), Launch(64, 64, 8, 4, 8, True)),
        (Launch(128, 64, 8, 4), Launch(128, 64, 8, 4, 8, True), Launch(128, 64, 8, 3, 4, True)),
    ),
}
# fmt: on


def sizes_for(rows: float) -> tuple[int, ...]:
    """Rows of a block worth trying when an expert has `rows` on average."""
    if rows <= 8:
        return (16,)
    if rows <= 40:
        return (16, 32, 64)
    return (64, 128) if rows <= 160 else (128, 256)


class Layer:
    """A layer's weights twice, and calls with fresh routing, on the GPU."""

    def __init__(self, shape: ModelShape, device: str = "cuda", copies: int = 2) -> None:
        self.shape, self.device = shape, device
        self.weights = [self._weights() for _ in range(copies)]

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        s = self.shape
        w1 = torch.empty(s.E, s.N, s.K, device=self.device, dtype=torch.bfloat16).normal_(std=s.K**-0.5)
        w2 = torch.empty(s.E, s.K, s.I, device=self.device, dtype=torch.bfloat16).normal_(std=s.I**-0.5)
        if not s.has_bias:
            return w1, w2, None, None
        return w1, w2, torch.randn(s.E, s.N, device=self.device), torch.randn(s.E, s.K, device=self.device)

    def inputs(self, M: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, weights and ids of one call."""
        scores = torch.randn(M, self.shape.E, device=self.device)
        weights, ids = scores.softmax(-1).topk(self.shape.topk)
        x = torch.randn(M, self.shape.K, device=self.device, dtype=torch.bfloat16)
        return x, weights, ids.int()


def graph_times(layer: Layer, M: int, plan: Plan | None, rounds: int) -> list[float]:
    """Milliseconds of `rounds` graph replays, each with new tokens and routing."""
    static = layer.inputs(M)
    out = torch.empty_like(static[0])
    scratch = DeviceScratch()

    def call(number: int) -> None:
        w1, w2, b1, b2 = layer.weights[number]
        triton_layer.routed(
            scratch, plan, out, static[0], w1, w2, static[1], static[2], layer.shape.activation, None, b1, b2
        )  # fmt: skip

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(0)
    side.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in layer.weights]
    for number, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=side):
            call(number)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds + 1)]
    for number, (start, end) in enumerate(events):
        for old, new in zip(static, layer.inputs(M), strict=True):
            old.copy_(new)
        start.record()
        graphs[number % len(graphs)].replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events[1:]]


def plans(m: int, base: Plan) -> Iterator[Plan]:
    """Plans that hold every candidate at least once."""
    firsts, seconds = CANDIDATES[m]
    for i in range(max(len(firsts), len(seconds))):
        yield replace(base, m=m, first=firsts[i % len(firsts)], second=seconds[i % len(seconds)])


def tune(layer: Layer, M: int, rounds: int) -> list[tuple[float, Plan]]:
    """Median milliseconds and plan, best first, one for each number of rows of a block."""
    pairs, E = M * layer.shape.topk, layer.shape.E
    best = []
    for m in sizes_for(pairs / E):
        firsts, seconds = CANDIDATES[m]

        def time(plan: Plan) -> float:
            try:
                return statistics.median(graph_times(layer, M, plan, rounds))
            except Exception as error:  # a launch that this GPU cannot hold
                print(f"  {plan}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                return float("inf")

        tried = {first: time(Plan(m, first, seconds[0])) for first in firsts}
        first = min(tried, key=tried.__getitem__)
        then = {second: time(Plan(m, first, second)) for second in seconds}
        second = min(then, key=then.__getitem__)
        best.append((then[second], Plan(m, first, second)))
        print(
            f"  M={M} m={m}: " + " ".join(f"{t:.4f}" for t in (*tried.values(), *then.values())), flush=True
        )
    return sorted(best, key=lambda pair: pair[0])


def compile_part(part: int, parts: int) -> None:
    """Compiles every parts-th candidate, in the forms that bf16 layers with and without biases use."""
    torch.cuda.set_device(0)
    silu = ModelShape("small", 4, 2, 512, 512)
    work: list[tuple[ModelShape, int, Plan]] = []
    for shape in (silu, replace(silu, activation="swigluoai", has_bias=True)):
        for m in CANDIDATES:
            for plan in plans(m, plan_for(1, 1)):
                work += [(shape, 8, plan)] + ([(shape, 1, plan)] if m == 16 else [])
    for shape, M, plan in work[part::parts]:
        layer = Layer(shape, copies=1)
        w1, w2, b1, b2 = layer.weights[0]
        x, weights, ids = layer.inputs(M)
        try:
            triton_layer.routed(
                DeviceScratch(), plan, torch.empty_like(x), x, w1, w2, weights, ids, shape.activation, None, b1, b2
            )  # fmt: skip
        except Exception as error:
            print(f"  {plan}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="qwen3-30b-a3b", help="names of moe_cpu.models, NAME/E for fewer experts"
    )
    parser.add_argument("--tokens", default="1,16,64,256,1024,4096,16384")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        compile_part(*map(int, options.part.split("/")))
        return
    command = [sys.executable, "-m", "moe_cpu.experts.triton_tune", "--part"]
    running = [subprocess.Popen([*command, f"{i}/{options.jobs}"]) for i in range(options.jobs)]
    for process in running:
        process.wait()
    found: list[dict[str, Any]] = []
    for name in options.model.split(","):
        name, _, experts = name.partition("/")
        shape = find(name).with_experts(int(experts)) if experts else find(name)
        print(shape.name, flush=True)
        layer = Layer(shape)
        for M in map(int, options.tokens.split(",")):
            rounds = options.rounds if M < 4096 else max(3, options.rounds // 3)
            table = statistics.median(graph_times(layer, M, None, rounds))
            for milliseconds, plan in tune(layer, M, rounds):
                found.append(
                    {"shape": shape.name, "M": M, "ms": milliseconds, "table_ms": table, **asdict(plan)}
                )
                print(f"  M={M} table {table:.4f} ms, {milliseconds:.4f} ms with {plan}", flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump(found, file, indent=1)
        del layer


if __name__ == "__main__":
    with torch.no_grad():
        main()
