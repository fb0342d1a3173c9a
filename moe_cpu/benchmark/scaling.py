"""How many times as fast layers and the machine's ceilings become with more threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moe_cpu.benchmark.report import OK, Report, Row, grouped


@dataclass(frozen=True)
class Curve:
    """Speed-ups by number of threads, over the least number there is.

    Attributes:
        name: of what becomes faster.
        values: by number of threads.
        M, contender: of a layer; None and "" for a ceiling or a limit.
    """

    name: str
    values: dict[int, float]
    M: int | None = None
    contender: str = ""


def of_ceilings(report: Report, rows: list[Row]) -> Iterator[Curve]:
    """The read bandwidth, and the matrix peak of every instruction set that some row ran on, or else of the best one."""
    found = [c for c in (*report.fewer_threads, report.ceilings) if c is not None]
    if not found:
        return
    yield _curve("read bandwidth", {c.threads: c.read for c in found})
    ran = {row.isa for row in rows}
    names = [name for name in found[0].matrix if name in ran] or list(found[0].matrix)[:1]
    for name in names:
        yield _curve(f"matrix peak, {name}", {c.threads: c.matrix[name] for c in found})


def of_layers(rows: list[Row]) -> Iterator[Curve]:
    """Each contender at each M, if it ran with the least number of threads, followed by the speed-up that its limits would allow."""
    least = min((row.case.threads for row in rows), default=0)
    measured = [row for row in rows if row.status == OK]
    for (M, contender), group in grouped(measured, lambda r: (r.case.M, r.case.contender)).items():
        rates = {row.case.threads: 1 / row.times.median for row in group if row.times is not None}
        if least not in rates:
            continue
        yield _curve(f"M = {M}, {contender}", rates, M, contender)
        limits = {row.case.threads: 1 / row.limit for row in group if row.limit is not None}
        if limits:
            yield _curve("its limit", limits)


def _curve(name: str, rates: dict[int, float], M: int | None = None, contender: str = "") -> Curve:
    first = rates[min(rates)]
    return Curve(name, {threads: rate / first for threads, rate in sorted(rates.items())}, M, contender)
