"""Pictures of an end-to-end report: where the time of a token goes, and what memory the model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_cpu.benchmark.end_to_end.report import EndToEndReport, Point
from moe_cpu.benchmark.plot import caption, pyplot
from moe_cpu.benchmark.report import OK
from moe_cpu.errors import ArgumentError

_INCHES_A_PANEL = (5.6, 2.0)
_EXPERTS, _REST = "C0", "0.8"


def save(report: EndToEndReport, path: str | Path) -> None:
    """Writes one picture: for each batch, bars of the time per call in prefill and in decode, split into experts and the rest; below, peak memory.

    Raises:
        ArgumentError: matplotlib is missing, makes no files of that suffix, or the report has no times.
    """
    plt = pyplot(path)
    done = [point for point in report.points if point.status == OK and point.phases]
    if not done:
        raise ArgumentError("plot: the report has no measured implementation")
    batches = list(dict.fromkeys(point.batch for point in done))
    width, height = _INCHES_A_PANEL
    rows = len(batches) + (report.released is not None)
    figure = plt.figure(figsize=(2 * width, rows * height + 0.5), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    for row, batch in enumerate(batches):
        for column in range(2):
            axes = figure.add_subplot(grid[row, column])
            _times(axes, [point for point in done if point.batch == batch], column)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", fontsize=7)
    if report.released is not None:
        _memory(figure.add_subplot(grid[-1, :]), report)
    m = report.model
    figure.suptitle(
        f"{m['name']}, {m['layers']} layers, {m['parameters'] / 1e9:.3g} billion parameters, transformers {report.environment['transformers']}\n"
        + caption(report.environment),
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _times(axes: Any, points: list[Point], number: int) -> None:
    points = points[::-1]  # bars grow upwards, the first implementation belongs on top
    phases = [point.phases[number] for point in points]
    names = [point.implementation for point in points]
    experts = [1e3 * phase.experts.median for phase in phases]
    whole = [1e3 * phase.whole.median for phase in phases]
    spread = [[1e3 * (p.whole.median - p.whole.p10) for p in phases]]
    spread.append([1e3 * (p.whole.p90 - p.whole.median) for p in phases])
    rest = [a - b for a, b in zip(whole, experts, strict=True)]
    axes.barh(names, experts, color=_EXPERTS, label="experts")
    axes.barh(names, rest, left=experts, color=_REST, label="the rest", xerr=spread, ecolor="0.3")
    right = max(1e3 * phase.whole.p90 for phase in phases)
    for place, phase in enumerate(phases):
        ratio = "" if phase.whole_comparison is None else f", {phase.whole_comparison.ratio:.2f}x"
        ours = "" if phase.experts_comparison is None else f" (experts {phase.experts_comparison.ratio:.2f}x)"
        axes.annotate(
            f"{phase.tokens_per_second:,.4g} tokens/s{ratio}{ours}",
            (1e3 * phase.whole.p90 + 0.015 * right, place), va="center", fontsize=7,
        )  # fmt: skip
    axes.set_xlim(0, 1.7 * right)
    axes.set_title(f"{phases[0].name}, batch {points[0].batch}: ms a call", fontsize=8)
    axes.tick_params(labelsize=7)


def _memory(axes: Any, report: EndToEndReport) -> None:
    r = report.released
    assert r is not None
    bars = {"run": r.run, "pack, release": r.pack, "load": r.load}
    axes.barh(
        list(bars),
        [peak.resident / 2**30 for peak in bars.values()],
        color=_REST,
        label="pages of the checkpoint's file",
    )
    axes.barh(list(bars), [peak.anonymous / 2**30 for peak in bars.values()], color="C2", label="anonymous")
    line = r.before.anonymous + report.model["weights_bytes"]
    axes.axvline(
        line / 2**30, color="0.3", linewidth=1, linestyle="--", label="process before, and the weights"
    )
    axes.set_title("peak memory, GiB", fontsize=8)
    axes.legend(fontsize=7, loc="lower right")
    axes.tick_params(labelsize=7)
