"""Runs a suite on a GPU: cases, checks, comparisons and reports are those of the CPU; times are CUDA events around calls to an idle GPU.

So a time has everything a caller waits for: what the host does before the first launch, gaps between launches, and the kernels. ``triton:queued`` is the same
call made while the GPU is busy with something else for about a millisecond, so the host's part counts only where it is longer than that. ``triton:graph`` is
the call replayed as a CUDA graph, on an idle GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_cpu import moe_align_block_size
from moe_cpu.benchmark import backends, check, cuda_timing, environment, memory, roofline, timing
from moe_cpu.benchmark.case import Case, Suite
from moe_cpu.benchmark.contender import Contender
from moe_cpu.benchmark.inputs import DenseLayer, Inputs, RandomSource, generator
from moe_cpu.benchmark.report import FAILED, OK, SKIPPED, WRONG, Report, Row
from moe_cpu.errors import ArgumentError, BackendUnavailable
from moe_cpu.models import ModelShape

CONTENDERS = ("triton", "triton:queued", "triton:graph", "grouped_mm", "grouped_mm:queued", "torch_loop")
NAMES = (*CONTENDERS, "reference")
_GRAPH, _QUEUED = ":graph", ":queued"
# What routing costs by itself: a prefill's ids, as many experts as published models have.
_ALIGNED = (16384, 8, 256, 64)


def run(
    suite: Suite,
    *,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[Report], None] | None = None,
) -> Report:
    """Measures every point of a suite on the current CUDA device, with random weights, tokens and routing.

    Args:
        progress, keep: as in `moe_cpu.benchmark.run`.

    Raises:
        ArgumentError: a contender that is not for GPUs.
        BackendUnavailable: torch sees no CUDA device.
        OutOfMemory: some shape does not fit; raised before anything is measured.
    """
    names = tuple(dict.fromkeys((*suite.contenders, *filter(None, [suite.baseline]))))
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ArgumentError(
            f"bench: on cuda, expected contenders among {', '.join(NAMES)}, got {', '.join(unknown)}"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(f"bench: torch {torch.__version__} sees no CUDA device")
    tell = progress or (lambda text: None)
    found = {name: backends.find(name) for name in dict.fromkeys(map(_called, names))}
    contenders = {name: found[_called(name)] for name in names}
    cache = torch.cuda.get_device_properties(0).L2_cache_size if suite.cold else 0
    extra = 2 * cache + (cuda_timing.WAIT_BYTES if any(name.endswith(_QUEUED) for name in names) else 0)
    available = torch.cuda.mem_get_info()[0]
    for shape in suite.shapes:
        memory.plan(shape, max(suite.tokens), list(found.values()), 0, extra, available)
    with torch.no_grad():
        tell("ceilings")
        report = Report(_environment(), cuda_timing.ceilings())
        if not suite.cold:
            report.notes.append("weights may have come from the cache, so shares of the limit mean little")
        evict = torch.ones(2 * cache // 4, device="cuda")
        for shape in suite.shapes:
            tell(f"{shape.name}: weights")
            layer = RandomSource("cuda").make_layer(shape, suite.seed)
            for routing, M in suite.points():
                tell(f"{shape.name}: {routing}, M = {M}")
                point = _Point(suite, contenders, layer, shape, routing, M, report.ceilings, evict)
                report.rows.extend(point.rows())
                if keep is not None:
                    keep(report)
            del layer, point
            torch.cuda.empty_cache()
        report.notes += [*_summaries(report.rows), _align_note()]
    if keep is not None:
        keep(report)
    return report


def _environment() -> dict[str, Any]:
    found = environment.describe(torch.get_num_threads())
    properties = torch.cuda.get_device_properties(0)
    try:
        from triton import __version__ as triton
    except ImportError:
        triton = None
    return {
        **found,
        "gpu": properties.name,
        "gpu_multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "gpu_cache_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
        "triton": triton,
    }


@dataclass
class _Point:
    suite: Suite
    contenders: dict[str, Contender]
    layer: DenseLayer
    shape: ModelShape
    routing: str
    M: int
    ceilings: roofline.Ceilings | None
    evict: Tensor

    def __post_init__(self) -> None:
        self.source = RandomSource("cuda")
        self.rng = generator(self.suite.seed * 1_000_003 + self.M, "cuda")
        self.inputs = self._draw()
        self.works: list[roofline.Work] = []

    def rows(self) -> list[Row]:
        """One row for each contender. A wrong answer, an exception or a refusal gets a reason and no time."""
        rows = {name: self._row(name, contender) for name, contender in self.contenders.items()}
        sample = check.sample_tokens(self.M, generator(self.suite.seed))
        want = check.expected(self.layer, self.inputs, self.shape, sample)
        calls = {}
        for name, row in rows.items():
            if row.status != OK:
                continue
            try:
                call = self._call(name)
                got = call()
            except Exception as error:
                row.status, row.reason = FAILED, f"{type(error).__name__}: {error}"
                continue
            row.relative_error, reason = check.verdict(got, sample, want)
            if reason is not None:
                row.status, row.reason = WRONG, reason
                continue
            calls[name] = call
        del want
        if calls:
            self._time(calls, rows)
        return list(rows.values())

    def _row(self, name: str, contender: Contender) -> Row:
        suite, threads = self.suite, torch.get_num_threads()
        case = Case(self.shape, self.M, name, suite.scheme, threads, self.routing, suite.seed)
        reason = contender.why_not(self.shape)
        return Row(case, None, contender.ours, OK if reason is None else SKIPPED, reason)

    def _call(self, name: str) -> Callable[[], Tensor]:
        """A call on the inputs that are in place when it is made."""
        contender = self.contenders[name]
        prepared = contender.prepare(self.layer, self.shape)
        if name.endswith(_GRAPH):
            return cuda_timing.captured(self.layer, self.inputs, self.shape)
        return lambda: contender.run(prepared, self.inputs, self.shape)

    def _draw(self) -> Inputs:
        return self.source.make_inputs(self.shape, self.M, self.routing, self.rng, self.suite.seed)

    def _renew(self) -> None:
        for old, new in zip(self.inputs, self._draw(), strict=True):
            old.copy_(new)
        self.works.append(roofline.routed_work(self.shape, self.inputs.topk_ids))

    def _time(self, calls: dict[str, Callable[[], Tensor]], rows: dict[str, Row]) -> None:
        cold = self.evict.numel() > 0
        empty = self.evict.sum if cold else (lambda: None)
        queued = [name for name in calls if name.endswith(_QUEUED)]
        taken = cuda_timing.interleave(calls, self._renew, self.suite.seconds, empty, queued)
        work = roofline.median_work(self.works[1:])  # the first round was not timed
        baseline = self.suite.baseline
        for name, seconds in taken.items():
            row = rows[name]
            row.times, row.work, row.layers, row.evicted = timing.summarise(seconds), work, 1, cold
            if self.ceilings is not None:
                row.limit, row.binding = self.ceilings.limit(work, None)
            beside = baseline + _QUEUED if name.endswith(_QUEUED) else baseline
            if beside in taken and name != beside:
                row.comparison = timing.compare(seconds, taken[beside])


def _summaries(rows: list[Row]) -> list[str]:
    """For each contender of ours, how it stands at each point to the best of the others: queued calls to queued ones, the rest to calls on an idle GPU."""
    points: dict[tuple[Any, ...], dict[str, float]] = {}
    ours = dict.fromkeys(row.case.contender for row in rows if row.ours)
    for row in rows:
        if row.times is not None:
            key = (row.case.shape, row.case.routing, row.case.M)
            points.setdefault(key, {})[row.case.contender] = row.times.median
    out = []
    for name in ours:
        ratios = [
            min(others) / times[name]
            for times in points.values()
            if name in times
            and (others := [t for other, t in times.items() if other not in ours and _alike(name, other)])
        ]
        if ratios:
            out.append(
                f"{name} beside the best of the others at each point: geometric mean {statistics.geometric_mean(ratios):.2f}x, "
                f"least {min(ratios):.2f}x, {len(ratios)} points"
            )
    return out


def _called(name: str) -> str:
    """The contender of that name, however its calls are made."""
    return name.partition(":")[0]


def _alike(name: str, other: str) -> bool:
    return name.endswith(_QUEUED) == other.endswith(_QUEUED)


def _align_note() -> str:
    M, topk, E, block = _ALIGNED
    ids = torch.rand((M, E), device="cuda").topk(topk).indices.int()

    def align() -> Tensor:
        return moe_align_block_size(ids, block, E)[0]

    calls = {"eager": align, "graph": cuda_timing.graphed(align)}
    taken = cuda_timing.interleave(calls, lambda: None, 0.1, lambda: None)
    eager, graph = (statistics.median(taken[name]) * 1e6 for name in calls)
    return f"moe_align_block_size of {M} x {topk} ids, {E} experts, blocks of {block}: {graph:.1f} us as a CUDA graph, {eager:.1f} us called"
