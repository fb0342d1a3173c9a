"""Times on a GPU: calls in turn between CUDA events, CUDA graphs, and the card's ceilings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from moe_cpu.benchmark.inputs import DenseLayer, Inputs
from moe_cpu.benchmark.roofline import Ceilings
from moe_cpu.benchmark.timing import MAX_CALLS, MIN_CALLS
from moe_cpu.experts.triton import TritonExperts
from moe_cpu.models import ModelShape

# Large enough to fill the card, far larger than its cache.
_COPIED_BYTES = 1 << 32
_MATRIX = 8192
_PROBES = 20
# Products that keep the card busy while the host gets ahead of it: 0.9 ms at 800 TFLOP/s.
_WAIT_MATRIX, _WAIT_PRODUCTS = 4096, 5
# What they are made of: two bf16 operands and a result.
WAIT_BYTES = 3 * _WAIT_MATRIX**2 * 2


def interleave(
    calls: dict[str, Callable[[], Any]],
    renew: Callable[[], None],
    seconds: float,
    before: Callable[[], Any],
    queued: Collection[str] = (),
) -> dict[str, list[float]]:
    """Times every call in turn until the time is used up, as `moe_cpu.benchmark.timing.interleave` does on the CPU.

    Args:
        renew: puts new inputs in place at the start of a round, not timed.
        seconds: of the whole loop; at least `MIN_CALLS` rounds are made, at most `MAX_CALLS`.
        before: called before each call, not timed; the GPU is idle when a call starts.
        queued: calls that are made while the GPU is busy with other work; their time begins when that ends.

    Returns: seconds of each call; one round more is made at the beginning and not counted.
    """
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait = _waiting() if queued else None
    until = math.inf
    for number in range(MAX_CALLS + 1):
        if number == 1:
            until = time.perf_counter() + seconds
        if number > MIN_CALLS and time.perf_counter() >= until:
            break
        renew()
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            before()
            torch.cuda.synchronize()
            if wait is not None and name in queued:
                wait()
            start.record()
            calls[name]()
            end.record()
            torch.cuda.synchronize()
            if number > 0:
                taken[name].append(start.elapsed_time(end) * 1e-3)
    return taken


def _waiting() -> Callable[[], None]:
    a, b = (torch.randn((_WAIT_MATRIX, _WAIT_MATRIX), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def wait() -> None:
        for _ in range(_WAIT_PRODUCTS):
            torch.mm(a, b, out=out)

    wait()
    return wait


def graphed(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`call` as a CUDA graph; each replay leaves its result in the same memory."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def captured(layer: DenseLayer, inputs: Inputs, shape: ModelShape) -> Callable[[], Tensor]:
    """The Triton layer on these very tensors as a CUDA graph, with scratch memory of its own that goes when it goes."""
    experts = TritonExperts()
    x, weights, ids = inputs
    out = torch.empty_like(x)

    def call() -> Tensor:
        experts.apply_weighted(
            out, x, layer.w1, layer.w2, weights, ids, shape.activation, w1_bias=layer.w1_bias, w2_bias=layer.w2_bias
        )  # fmt: skip
        return out

    return graphed(call)


def ceilings() -> Ceilings:
    """Bytes/s of copying memory, read and written bytes together, and FLOP/s of a bf16 matrix product by torch."""
    return Ceilings({"bf16": _product_rate()}, _copy_rate(), torch.get_num_threads())


def _copy_rate() -> float:
    source = torch.ones(_COPIED_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / _median(lambda: target.copy_(source))


def _product_rate() -> float:
    a, b = (torch.randn((_MATRIX, _MATRIX), device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * _MATRIX**3 / _median(lambda: a @ b)


def _median(call: Callable[[], Any]) -> float:
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_PROBES)]
    call()
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs) * 1e-3
