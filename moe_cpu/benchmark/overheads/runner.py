"""Measures all overheads: plan the memory, then group by group."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_cpu import native_library
from moe_cpu.benchmark import environment, memory
from moe_cpu.benchmark.limits import check_seconds, check_seed, check_threads
from moe_cpu.benchmark.overheads import layer_call, packing, packing_peak, sorting
from moe_cpu.benchmark.overheads.report import OverheadsReport
from moe_cpu.benchmark.runner import threads_set
from moe_cpu.errors import BackendUnavailable
from moe_cpu.models import ModelShape

STEPS = 4


def run(
    shape: ModelShape,
    *,
    threads: int | None = None,
    seconds: float = 2.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> OverheadsReport:
    """Measures the layer call, sorting, and packing of a layer of this shape.

    Args:
        shape: what is packed.
        threads: None takes torch's number of threads.
        seconds: for each group.
        progress: called with a short text before each of `STEPS` steps.

    Raises:
        ArgumentError: `threads`, `seconds` or `seed` make no sense.
        NativeLibraryMissing: there is nothing to measure.
        OutOfMemory: the layer does not fit; raised before any of it is made.
    """
    check_threads(1 if threads is None else threads)
    check_seconds(seconds)
    check_seed(seed)
    native_library.library()
    packing.plan(shape, memory.available_bytes())
    tell = progress or (lambda text: None)
    with threads_set(threads) as number, torch.no_grad():
        report = OverheadsReport(environment.describe(number), shape.name)
        tell(layer_call.WHAT)
        report.costs += layer_call.measure(number, seconds, seed)
        tell(sorting.WHAT)
        report.costs += sorting.measure(number, seconds, seed)
        tell(f"{packing.WHAT} {shape.name}")
        report.costs += packing.measure(shape, number, seconds, seed)
        tell("packing in a process of its own")
        try:
            report.peak = packing_peak.measure(shape, number)
        except BackendUnavailable as error:  # times can be had all the same
            report.notes.append(f"memory of packing was not measured: {error}")
    return report
