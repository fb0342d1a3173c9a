"""A report as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moe_cpu.benchmark import scaling
from moe_cpu.benchmark.report import OK, Report, Row, grouped
from moe_cpu.benchmark.timing import Comparison

_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("M", lambda r: str(r.case.M)),
    ("threads", lambda r: str(r.case.threads)),
    ("contender", lambda r: r.case.contender),
    ("isa", lambda r: r.isa or "-"),
    ("median ms", lambda r: milliseconds(r.times.median if r.times else None)),
    (
        "p10 - p90",
        lambda r: f"{milliseconds(r.times.p10)} - {milliseconds(r.times.p90)}" if r.times else "-",
    ),
    ("n", lambda r: str(r.times.n) if r.times else "-"),
    ("TFLOP/s", lambda r: _number(r.flops, 1e12)),
    ("GB/s", lambda r: _number(r.bandwidth, 1e9)),
    ("% of limit", lambda r: "-" if r.efficiency is None else f"{100 * r.efficiency:.0f} ({r.binding})"),
    ("tokens/s", lambda r: "-" if r.tokens_per_second is None else f"{r.tokens_per_second:,.0f}"),
    ("against baseline", lambda r: comparison(r.comparison)),
    ("beside uniform", lambda r: _skew(r)),
    ("scratch MiB", lambda r: _scratch(r)),
)


def milliseconds(seconds: float | None) -> str:
    """Three digits of it."""
    return "-" if seconds is None else f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3g}"


def _threads(number: int) -> str:
    return f"{number} thread{'' if number == 1 else 's'}"


def comparison(c: Comparison | None) -> str:
    """`1.50x [1.45, 1.56] better`."""
    return "-" if c is None else f"{c.ratio:.2f}x [{c.low:.2f}, {c.high:.2f}] {c.verdict}"


def _skew(row: Row) -> str:
    """`0.310x, limit 0.290x: +7 %`."""
    s = row.skew
    return "-" if s is None else f"{s.time.ratio:.3g}x, limit {s.limit:.3g}x: {100 * s.excess:+.0f} %"


def _scratch(row: Row) -> str:
    if row.scratch is None:
        return "-"
    over = " (over)" if row.scratch > row.scratch_bound else ""
    return f"{row.scratch / 2**20:.1f} of {row.scratch_bound / 2**20:.1f}{over}"


def environment_lines(e: dict[str, Any]) -> Iterator[str]:
    """Where it was measured, and with what."""
    if e.get("gpu"):
        yield f"{e['gpu']}, CUDA {e['cuda']}, Triton {e['triton'] or 'not installed'}; host:"
    yield f"{e['cpu']}, {e['logical_cpus']} logical CPUs, {e['threads']} threads, best ISA {e['isa'] or 'none'}"
    yield f"moe-cpu {e['moe_cpu']} ({e['commit'] or 'no commit'}), torch {e['torch']}, Python {e['python']}, {e['compiler'] or 'no native library'}"


def lines(report: Report) -> Iterator[str]:
    """The report, line by line: where it was measured, ceilings, one table for each shape and routing, what did not run and why."""
    e = report.environment
    yield from environment_lines(e)
    if report.ceilings is None:
        yield "ceilings: not measured, the native library is missing"
    several = len(report.thread_counts) > 1
    for ceilings in filter(None, [*report.fewer_threads, report.ceilings]):
        peaks = ", ".join(f"{name} {value / 1e12:.3g} TFLOP/s" for name, value in ceilings.matrix.items())
        how = "a product by torch" if e.get("gpu") else "operands in registers"
        of = f" of {_threads(ceilings.threads)}" if several else ""
        yield f"ceilings{of}: {peaks} ({how}), memory {ceilings.read / 1e9:.3g} GB/s"
    for (shape, routing), rows in grouped(report.rows, lambda r: (r.case.shape, r.case.routing)).items():
        yield ""
        bias = ", biases" if shape.has_bias else ""
        yield f"{shape.name}: E={shape.E} topk={shape.topk} K={shape.K} I={shape.I}, {shape.activation}{bias}, {routing} routing"
        shown = [row for row in rows if row.status == OK]
        yield from _table(shown, several)
        for sentence in dict.fromkeys(_absence(row) for row in rows if row.status != OK):
            yield "  " + sentence
        if several:
            yield ""
            yield from _speedups(report, shown)
    for note in report.notes:
        yield ""
        yield "note: " + note


def _absence(row: Row) -> str:
    place = "" if row.status == "skipped" else f" at M={row.case.M}"
    return f"{row.case.contender} {row.status}{place}: {row.reason}"


def _table(rows: list[Row], threads: bool) -> Iterator[str]:
    """Rows under the titles, without the columns in which none of them has anything, and with that of `threads` if it is wanted."""
    if not rows:
        return
    columns = [[title, *map(show, rows)] for title, show in _COLUMNS]
    filled = [column for column in columns if set(column[1:]) != {"-"}]
    wanted = [column for column in filled if threads or column[0] != "threads"]
    yield from aligned(list(zip(*wanted, strict=True)))


def _speedups(report: Report, rows: list[Row]) -> Iterator[str]:
    """What each number of threads gains over the least: the ceilings, and each contender beside its own limit."""
    counts = report.thread_counts
    curves = [*scaling.of_ceilings(report, rows), *scaling.of_layers(rows)]
    titles = [f"speed-up over {_threads(counts[0])}", *map(str, counts)]
    yield from aligned(
        [titles, *([curve.name, *(_number(curve.values.get(n), 1) for n in counts)] for curve in curves)],
        group=0,
    )


def aligned(cells: Sequence[Sequence[str]], group: int = 1) -> Iterator[str]:
    """Rows of cells as lines with columns to the right, titles first; an empty line where one of the first `group` columns changes."""
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for number, line in enumerate(cells):
        if number > 1 and line[:group] != cells[number - 1][:group]:
            yield ""
        yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
