"""Speed-ups over the number of threads: a panel of a report's picture."""

from __future__ import annotations

from typing import Any

from moe_cpu.benchmark import scaling
from moe_cpu.benchmark.report import Report, Row

_CEILINGS = ("--", "-.", ":")
_LAYERS = ("-", (0, (6, 2)), (0, (3, 1)), (0, (1, 1)))


def draw(axes: Any, report: Report, rows: list[Row], style: dict[str, Any]) -> None:
    """Layers in their contender's colour (an only one: in a colour for each M), one kind of line for each M; bandwidth and matrix peaks grey; as many times as fast as there are threads, thin.

    Args:
        rows: of one shape and routing.
        style: colour and marker by contender.
    """
    counts = report.thread_counts
    axes.plot(counts, [n / counts[0] for n in counts], color="0.8", linewidth=0.6)
    for number, curve in enumerate(scaling.of_ceilings(report, rows)):
        style_of: dict[str, Any] = {"color": "0.3", "linestyle": _CEILINGS[number % len(_CEILINGS)]}
        axes.plot(*_points(curve), linewidth=1, label=curve.name, **style_of)
    layers = [curve for curve in scaling.of_layers(rows) if curve.contender]
    tokens = sorted({curve.M for curve in layers if curve.M is not None})
    for curve in layers:
        place = tokens.index(curve.M or 0)
        style_of = {**style[curve.contender], "linestyle": _LAYERS[place % len(_LAYERS)]}
        if len(style) == 1:
            style_of["color"] = f"C{place % 10}"
        axes.plot(*_points(curve), linewidth=1, label=curve.name, **style_of)
    axes.set(xscale="log", yscale="log", xlabel="threads", ylabel=f"times as fast as with {counts[0]}")
    axes.set_xticks(counts, labels=[str(n) for n in counts])
    marks = [n / counts[0] for n in counts]
    axes.set_yticks(marks, labels=[f"{mark:g}" for mark in marks])
    axes.minorticks_off()
    axes.grid(True, which="major", linewidth=0.3)
    axes.legend(fontsize=7, loc="upper left")


def _points(curve: scaling.Curve) -> tuple[list[int], list[float]]:
    return list(curve.values), list(curve.values.values())
