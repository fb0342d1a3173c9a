"""Draws the curves of a training run: python bench/tiny-qwen3-moe/plot.py loss.json loss.png"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], picture: Path) -> None:
    """Left: the loss on both sides of the split. Right: the share of each expert in each layer. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)

    training = report["training"]
    for curve, label, style in (("curve", "training", "-"), ("held_out_curve", "held-out documents", "o-")):
        points = training[curve]
        left.plot([p["step"] for p in points], [p["loss"] for p in points], style, markersize=3, label=label)
    left.axvline(training["kept_step"], color="grey", linewidth=0.8, linestyle=":", label="kept")
    left.set_xlabel("step")
    left.set_ylabel("nats per token")
    left.set_title("Loss")
    left.legend()

    shares = report["expert_share"]
    image = right.imshow([[100 * share for share in row] for row in shares], aspect="auto", cmap="viridis")
    right.set_xlabel("expert")
    right.set_ylabel("layer")
    right.set_yticks(range(len(shares)))
    right.set_title(f"Share of the routed pairs, % (even: {100 / len(shares[0]):.2f})")
    figure.colorbar(image, ax=right)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
