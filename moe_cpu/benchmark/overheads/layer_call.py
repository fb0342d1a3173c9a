"""What a layer call costs when it has next to nothing to compute."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from moe_cpu import fused_experts
from moe_cpu.benchmark import check
from moe_cpu.benchmark.inputs import Inputs, RandomSource, generator
from moe_cpu.benchmark.overheads.report import Cost
from moe_cpu.benchmark.timing import interleave, summarise
from moe_cpu.models import ModelShape
from moe_cpu.packing import PackedExperts

WHAT = "layer call"
SHAPE = ModelShape("nearly-empty", E=8, topk=2, K=64, I=32)
# Calls after a change of the number of threads: many, because the change itself starts or ends threads.
_CALLS = 500


def measure(threads: int, seconds: float, seed: int) -> list[Cost]:
    """One token through packed experts of 64 x 32, with one thread and with all; every call is timed on its own."""
    source = RandomSource()
    layer = source.make_layer(SHAPE, seed)
    inputs = source.make_inputs(SHAPE, 1, "uniform", generator(seed), seed)
    packed = PackedExperts.pack(*layer)
    name = f"M=1, E={SHAPE.E}, topk={SHAPE.topk}, K={SHAPE.K}, I={SHAPE.I}"
    rows = torch.arange(1)
    answer = _call(packed, inputs)
    _, wrong = check.verdict(answer, rows, check.expected(layer, inputs, SHAPE, rows))
    if wrong is not None:
        return [Cost(WHAT, name, threads, wrong=wrong)]
    taken: dict[str, list[float]] = {str(n): [] for n in dict.fromkeys((1, threads))}

    def set_threads(number: str) -> None:
        torch.set_num_threads(int(number))
        _call(packed, inputs)

    def many(number: str, *_arguments: Any) -> None:
        for _ in range(_CALLS):
            start = time.perf_counter()
            _call(packed, inputs)
            taken[number].append(time.perf_counter() - start)

    try:
        interleave({n: partial(many, n) for n in taken}, lambda: None, seconds, set_threads, lambda _: None)
    finally:
        torch.set_num_threads(threads)
    # The first round warms up.
    return [Cost(WHAT, name, int(n), summarise(calls[_CALLS:])) for n, calls in taken.items()]


def _call(packed: PackedExperts, inputs: Inputs) -> torch.Tensor:
    return fused_experts(inputs.x, packed, None, inputs.topk_weights, inputs.topk_ids)
