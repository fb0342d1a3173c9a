"""A report of overheads as text."""

from __future__ import annotations

from collections.abc import Iterator

from moe_cpu.benchmark.memory import gib
from moe_cpu.benchmark.overheads.report import Cost, OverheadsReport
from moe_cpu.benchmark.table import aligned, environment_lines

_TITLES = ("", "call", "threads", "median", "p10", "p90", "n", "GB/s")


def lines(report: OverheadsReport) -> Iterator[str]:
    """The report, line by line: where, times, how they compare, memory."""
    yield from environment_lines(report.environment)
    yield ""
    yield from aligned([_TITLES, *map(_cells, report.costs)])
    yield ""
    for cost in report.costs:
        if cost.wrong is not None:
            yield f"{cost.name} is wrong: {cost.wrong}"
        for other in report.costs:
            if other.what == cost.what and other.name in cost.beside:
                yield _beside(cost, other)
    if report.peak is not None:
        p = report.peak
        yield (
            f"packing {report.packed_layer}, each dense expert let go once it is packed: at most {gib(p.peak)} held, which is the dense weights "
            f"({gib(p.dense)}) and {(p.peak - p.dense) / p.expert:.2f} dense experts more ({p.expert / 2**20:.1f} MiB each)"
        )
    for note in report.notes:
        yield "note: " + note


def _cells(cost: Cost) -> tuple[str, ...]:
    t = cost.times
    times = ("-",) * 4 if t is None else (*map(duration, (t.median, t.p10, t.p90)), str(t.n))
    rate = "-" if cost.bandwidth is None else f"{cost.bandwidth / 1e9:.3g}"
    return cost.what, cost.name, str(cost.threads), *times, rate


def _beside(cost: Cost, other: Cost) -> str:
    c = cost.beside[other.name]
    text = f"{cost.name} takes {c.ratio:.2f} [{c.low:.2f}, {c.high:.2f}] times as long as {other.name}"
    if cost.bandwidth is not None and other.bandwidth is not None:
        text += f", at {100 * cost.bandwidth / other.bandwidth:.0f} % of its GB/s"
    return text


def duration(seconds: float) -> str:
    """Three digits of it, in microseconds, milliseconds or seconds."""
    unit, scale = ("us", 1e6) if seconds < 1e-3 else ("ms", 1e3) if seconds < 1 else ("s", 1)
    return f"{seconds * scale:.3g} {unit}"
