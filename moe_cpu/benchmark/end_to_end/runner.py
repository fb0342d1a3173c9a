"""Runs an end-to-end measurement: plan, memory of loading and packing, then every batch, checked first and timed in turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from torch import Tensor

from moe_cpu.benchmark import environment, memory
from moe_cpu.benchmark.end_to_end import high_water, load_and_pack, model_source, needs, rounds
from moe_cpu.benchmark.end_to_end.experts_clock import ExpertsClock
from moe_cpu.benchmark.end_to_end.generation import generate
from moe_cpu.benchmark.end_to_end.prompts import prompt_of
from moe_cpu.benchmark.end_to_end.report import Agreement, EndToEndReport, Point
from moe_cpu.benchmark.end_to_end.settings import Settings
from moe_cpu.benchmark.report import FAILED, OK, WRONG
from moe_cpu.benchmark.runner import threads_set
from moe_cpu.errors import ArgumentError, BackendUnavailable
from moe_cpu.integrations.transformers import NAME, explain, pack
from moe_cpu.integrations.transformers.agreement import bf16_bound, logits_difference
from moe_cpu.models import find

# transformers' own that run on a CPU.
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", NAME)


def run(
    settings: Settings,
    *,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[EndToEndReport], None] | None = None,
) -> EndToEndReport:
    """Measures a model.

    Args:
        progress: called with a short text before each of `steps(settings)` steps.
        keep: called with the report so far after each batch.

    Raises:
        ArgumentError: an unknown implementation or shape, a folder that transformers cannot load, or the first implementation raised.
        OutOfMemory: it does not fit; raised before anything large is made, with the numbers.
    """
    tell = progress or (lambda text: None)
    unknown = [name for name in settings.implementations if name not in IMPLEMENTATIONS]
    if unknown:
        raise ArgumentError(
            f"implementations: expected names among {', '.join(IMPLEMENTATIONS)}, got {', '.join(unknown)}"
        )
    with threads_set(settings.threads) as threads:
        config = model_source.config_of(settings.source)
        sizes = needs.sizes_of(model_source.skeleton(config))
        planned = needs.plan(sizes, settings, memory.available_bytes())
        report = EndToEndReport(
            {**environment.describe(threads), "transformers": transformers.__version__},
            dataclasses.asdict(settings),
            dataclasses.asdict(sizes),
            dataclasses.asdict(planned),
        )
        if NAME in settings.implementations:
            tell("loading and packing in a process of its own")
            try:
                report.released = load_and_pack.measure(settings)
            except BackendUnavailable as error:  # times can be had all the same
                report.notes.append(f"memory of loading and packing was not measured: {error}")
        tell("weights")
        high_water.reset()
        model = model_source.load(settings.source, config, settings.implementations[0])
        report.notes += _notes(sizes, settings)
        if NAME in settings.implementations:
            tell("packing")
            model.set_experts_implementation(NAME)
            report.notes += _left(model)
            pack(model, progress=False)
        for batch in settings.batches:
            _measure(model, settings, batch, report.points, tell)
            report.both_layouts = high_water.resident_peak()
            if keep is not None:
                keep(report)
    return report


def steps(settings: Settings) -> int:
    """How many steps `run` tells of."""
    return 1 + 2 * (NAME in settings.implementations) + 2 * len(settings.batches)


def _measure(
    model: Any, settings: Settings, batch: int, points: list[Point], tell: Callable[[str], None]
) -> None:
    """Appends one point for each implementation."""
    prompt = prompt_of(model, settings, batch)
    baseline, *others = settings.implementations
    mine = {name: Point(batch, name) for name in settings.implementations}
    points.extend(mine.values())
    with ExpertsClock(model) as clock:
        tell(f"batch {batch}: checking")
        try:
            first = _greedy(model, clock, prompt, settings, baseline)
        except Exception as error:  # an implementation may raise anything
            raise ArgumentError(
                f"{baseline}, the implementation that others are compared with, failed: {type(error).__name__}: {error}"
            ) from error
        for name in others:
            try:
                mine[name].agreement = _compare(model, clock, prompt, settings, first, name)
            except Exception as error:  # an implementation may raise anything
                mine[name].status, mine[name].reason = FAILED, f"{type(error).__name__}: {error}"
                continue
            _judge(mine[name], baseline)
        tell(f"batch {batch}: timing")
        able = [name for name in settings.implementations if mine[name].status == OK]
        times = rounds.take(model, clock, prompt, first, settings, able)
    for name in able:
        mine[name].phases = rounds.phases(times, name, baseline, batch, settings.prompt_tokens)
        agreement = mine[name].agreement
        if agreement is not None:
            agreement.equal_choices = int((times[name][0].choices == times[baseline][0].choices).sum())


def _greedy(model: Any, clock: ExpertsClock, prompt: Tensor, settings: Settings, name: str) -> Tensor:
    model.set_experts_implementation(name)
    return generate(model, clock, prompt, settings.new_tokens).choices


def _compare(
    model: Any, clock: ExpertsClock, prompt: Tensor, settings: Settings, first: Tensor, name: str
) -> Agreement:
    distance = logits_difference(model, prompt, name, settings.implementations[0], last=True)
    same = _greedy(model, clock, prompt, settings, name) == first
    layers = model.config.get_text_config().num_hidden_layers
    return Agreement(distance, bf16_bound(layers), int(same.cumprod(1).sum()), 0, same.numel())


def _judge(point: Point, baseline: str) -> None:
    found = point.agreement
    assert found is not None
    if not found.distance <= found.bound:  # so that NaN is wrong
        point.status = WRONG
        point.reason = (
            f"after the prompt its logits are {found.distance:.4f} away from {baseline}'s, relative to their norm and with the same routing; "
            f"two bf16 runs may differ by {found.bound:.4f}"
        )


def _notes(sizes: needs.Sizes, settings: Settings) -> Iterator[str]:
    if settings.source.shape is not None:
        yield (
            "weights are random: times and memory are those of a model of this size; routing is nearly even, and greedy tokens mean nothing, "
            "so that the last bit may decide between two of them"
        )
        published = find(settings.source.shape).layers
        if sizes.layers < published:
            yield (
                f"{sizes.layers} of {published} layers: beside them, embedding and head weigh {published / sizes.layers:.3g} times as much as in the "
                "whole model, and experts so much less"
            )
    cache = memory.last_level_cache_bytes()
    if sizes.experts_bytes < 2 * cache:
        yield (
            f"all experts together are {sizes.experts_bytes / 2**20:.1f} MiB, less than twice the last-level cache of {cache / 2**20:.0f} MiB: "
            "weights may have come from there"
        )


def _left(model: Any) -> Iterator[str]:
    """Says which layers the kernels do not take, once for each reason."""
    layers = explain(model)
    for reason in dict.fromkeys(layer.reason for layer in layers if layer.activation is None):
        number = sum(layer.reason == reason for layer in layers)
        yield f"{NAME} runs {number} of {len(layers)} experts layers on its reference path: {reason}"
