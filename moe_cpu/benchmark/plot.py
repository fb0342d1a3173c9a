"""Pictures of a report: each case under the measured ceilings, and tokens per second over the number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_cpu.benchmark import plot_threads
from moe_cpu.benchmark.report import OK, Report, Row, grouped
from moe_cpu.errors import ArgumentError

_MARKERS = "osD^vPX*<>"
_INCHES_A_PANEL = (6.4, 4.2)


def save(report: Report, path: str | Path) -> None:
    """Writes one picture (any format that matplotlib knows by its suffix): a row of two panels for each shape and routing.

    Left, the roofline: FLOP/s over FLOP per byte, with bandwidth and matrix peaks as lines. Right: tokens/s over M; thin bars are p10 to p90. Of several
    numbers of threads, both show the most, and a third panel the speed-ups (`plot_threads`).

    Raises:
        ArgumentError: matplotlib is missing, makes no files of that suffix, or the report has no times.
    """
    plt = pyplot(path)
    measured = [row for row in report.rows if row.status == OK and row.times is not None]
    if not measured:
        raise ArgumentError("plot: the report has no measured case")
    counts = report.thread_counts
    groups = grouped(measured, lambda r: (r.case.shape, r.case.routing))
    names = list(dict.fromkeys(row.case.contender for row in measured))
    style = {
        name: {"color": f"C{i % 10}", "marker": _MARKERS[i % len(_MARKERS)]} for i, name in enumerate(names)
    }
    width, height = _INCHES_A_PANEL
    figure, axes = plt.subplots(
        len(groups),
        panels := 2 if len(counts) == 1 else 3,
        figsize=(panels * width, len(groups) * height + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for (left, right, *third), ((shape, routing), rows) in zip(axes, groups.items(), strict=True):
        group = [row for row in rows if row.case.threads == counts[-1]]
        title = f"{shape.name} (E={shape.E}, topk={shape.topk}, K={shape.K}, I={shape.I}), {routing}"
        _roofline(left, report, group, style)
        left.set_title(title, fontsize=9)
        _throughput(right, group, style)
        right.set_title("tokens per second", fontsize=9)
        for panel in third:
            plot_threads.draw(panel, report, rows, style)
            panel.set_title("speed-up with more threads", fontsize=9)
    figure.suptitle(caption(report.environment), fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def caption(environment: dict[str, Any]) -> str:
    """Where a picture's numbers come from, in one line."""
    e = environment
    text = f"{e.get('gpu') or e['cpu']}, {e['threads']} threads, moe-cpu {e['moe_cpu']} ({e['commit'] or 'no commit'}), torch {e['torch']}"
    return text.replace("$", r"\$")  # which matplotlib would read as a formula


def pyplot(picture: str | Path) -> Any:
    """matplotlib's drawing functions, for the file `picture` and not for a screen.

    Raises:
        ArgumentError: matplotlib is missing, or makes no files of that suffix.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot
    except ImportError as error:
        raise ArgumentError("plot: drawing needs matplotlib; install moe-cpu[plot]") from error
    known = set(matplotlib.backend_bases.FigureCanvasBase.get_supported_filetypes()) - {
        "pgf"
    }  # which needs LaTeX
    if Path(picture).suffix.lower().lstrip(".") not in known:
        raise ArgumentError(
            f"plot: expected a file ending in one of .{', .'.join(sorted(known))}, got {picture}"
        )
    return matplotlib.pyplot


def _by_contender(rows: list[Row]) -> dict[str, list[Row]]:
    return grouped(rows, lambda r: r.case.contender)


def _roofline(axes: Any, report: Report, rows: list[Row], style: dict[str, Any]) -> None:
    intensities = [row.work.flops / row.work.bytes for row in rows if row.work]
    low, high = min(intensities) / 2, max(intensities) * 2
    if report.ceilings is not None:
        high = max(high, 2 * max(report.ceilings.matrix.values()) / report.ceilings.read)
        for name, peak in report.ceilings.matrix.items():
            ridge = peak / report.ceilings.read
            corners = [low, min(max(ridge, low), high), high]
            axes.plot(
                corners,
                [min(peak, report.ceilings.read * c) / 1e12 for c in corners],
                color="0.3",
                linewidth=1,
            )
            axes.annotate(
                f"{name} peak", (high, peak / 1e12), ha="right", va="bottom", fontsize=7, color="0.3"
            )
        axes.annotate(
            "copy bandwidth" if "gpu" in report.environment else "read bandwidth",
            (low, report.ceilings.read * low / 1e12),
            va="bottom",
            fontsize=7,
            color="0.3",
        )
    for name, group in _by_contender(rows).items():
        points = [(r.work.flops / r.work.bytes, (r.flops or 0) / 1e12) for r in group if r.work]
        axes.plot(*zip(*points, strict=True), linestyle="", label=name, **style[name])
    axes.set(xscale="log", yscale="log", xlabel="routed FLOP per byte", ylabel="TFLOP/s")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right")


def _throughput(axes: Any, rows: list[Row], style: dict[str, Any]) -> None:
    for name, group in _by_contender(rows).items():
        tokens = [r.case.M for r in group]
        rate = [r.case.M / r.times.median for r in group if r.times]
        spread = [[r.case.M / r.times.median - r.case.M / r.times.p90 for r in group if r.times]]
        spread.append([r.case.M / r.times.p10 - r.case.M / r.times.median for r in group if r.times])
        axes.errorbar(tokens, rate, yerr=spread, linewidth=1, elinewidth=0.6, label=name, **style[name])
    axes.set(xscale="log", yscale="log", xlabel="tokens in a call, M", ylabel="tokens/s")
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=7, loc="lower right")
