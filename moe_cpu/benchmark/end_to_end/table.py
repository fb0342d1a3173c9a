"""An end-to-end report as text."""

from __future__ import annotations

from collections.abc import Iterator

from moe_cpu.benchmark.end_to_end.report import EndToEndReport, Phase, Point, Released
from moe_cpu.benchmark.memory import gib
from moe_cpu.benchmark.report import OK
from moe_cpu.benchmark.table import aligned, comparison, environment_lines, milliseconds

_TITLES = (
    "batch",
    "phase",
    "experts by",
    "ms a call",
    "p10 - p90",
    "n",
    "tokens/s",
    "experts ms",
    "experts %",
    "model against first",
    "experts alone against first",
)


def lines(report: EndToEndReport) -> Iterator[str]:
    """The report, line by line: where, what, times, agreement, memory."""
    yield from environment_lines(report.environment)
    m, s = report.model, report.settings
    yield ""
    yield (
        f"{m['name']} {_origin(s['source'])}, bf16: {m['layers']} layers, {m['parameters'] / 1e9:.3g} billion parameters, "
        f"{gib(m['weights_bytes'])}"
    )
    yield (
        f"experts: {m['experts_layers']} layers, E={m['E']}, topk={m['topk']}, {gib(m['experts_bytes'])}; attention {m['attention']}; "
        f"transformers {report.environment['transformers']}"
    )
    yield f"prompts of {s['prompt_tokens']} tokens, {s['new_tokens']} decode steps; prefill is the time to the first token"
    yield ""
    yield from aligned([_TITLES, *_rows(report)], group=2)
    yield ""
    for point in report.points:
        yield from _agreement(point, s["implementations"][0])
    yield ""
    yield from _memory(report)
    for note in report.notes:
        yield ""
        yield "note: " + note


def _origin(source: dict[str, object]) -> str:
    return f"from {source['folder']}" if source["folder"] else f"of the sizes of {source['shape']}, random"


def _rows(report: EndToEndReport) -> Iterator[tuple[str, ...]]:
    done = [point for point in report.points if point.status == OK]
    for batch in dict.fromkeys(point.batch for point in done):
        for number in range(2):  # prefill, decode
            for point in done:
                if point.batch == batch:
                    yield (str(batch), *_cells(point, point.phases[number]))


def _cells(point: Point, phase: Phase) -> tuple[str, ...]:
    whole = phase.whole
    return (
        phase.name,
        point.implementation,
        milliseconds(whole.median),
        f"{milliseconds(whole.p10)} - {milliseconds(whole.p90)}",
        str(whole.n),
        f"{phase.tokens_per_second:,.4g}"
        if phase.tokens_per_second < 1000
        else f"{phase.tokens_per_second:,.0f}",
        milliseconds(phase.experts.median),
        f"{100 * phase.experts_share:.0f}",
        comparison(phase.whole_comparison),
        comparison(phase.experts_comparison),
    )


def _agreement(point: Point, baseline: str) -> Iterator[str]:
    if point.status != OK:
        yield f"{point.implementation} {point.status} at batch {point.batch}: {point.reason}"
    elif point.agreement is not None:
        a = point.agreement
        yield (
            f"{point.implementation} beside {baseline}, batch {point.batch}: logits after the prompt {a.distance:.4f} apart (two bf16 runs may be "
            f"{a.bound:.4f}); greedy tokens equal: {a.equal_tokens} of {a.tokens} up to the first difference, {a.equal_choices} of {a.tokens} after "
            "the same tokens"
        )


def _memory(report: EndToEndReport) -> Iterator[str]:
    weights = report.model["weights_bytes"]
    if report.released is not None:
        r: Released = report.released
        rows = [("peak memory to", "resident", "anonymous", "beyond the process before", "of the weights")]
        for name, peak in (
            ("load", r.load),
            ("pack, giving dense weights up", r.pack),
            ("run the packed model", r.run),
        ):
            more = peak.anonymous - r.before.anonymous
            rows.append((name, gib(peak.resident), gib(peak.anonymous), gib(more), f"{more / weights:.2f}x"))
        yield from aligned(rows, group=0)
        yield (
            f"  in a process of its own that held {gib(r.before.anonymous)} before and {gib(r.after.anonymous)} in the end; resident pages include "
            "those of the checkpoint's file, which the kernel may drop"
            + ("" if r.separate else "; each resident peak includes those before it")
        )
    if report.both_layouts is not None:
        yield f"  while implementations took turns: {gib(report.both_layouts)} resident, {gib(sum(report.planned[k] for k in ('weights', 'packed', 'call', 'reserve')))} planned"
