"""Peak memory of loading a model and packing it, in a process of its own, where nothing else has raised the high-water mark.

``python -m moe_cpu.benchmark.end_to_end.load_and_pack SETTINGS`` is that process: it takes `Settings` as JSON and prints a `Released` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from moe_cpu.benchmark import own_process
from moe_cpu.benchmark.end_to_end import high_water
from moe_cpu.benchmark.end_to_end.report import Released, released_from
from moe_cpu.benchmark.end_to_end.settings import ModelSource, Settings

# Steps of the run after packing: enough to touch everything that a longer one touches.
_STEPS = 2


def measure(settings: Settings) -> Released:
    """`Released` of the settings' model and largest batch.

    Raises:
        BackendUnavailable: the process failed, with its last words.
    """
    return released_from(
        own_process.run(__name__, "loading and packing", json.dumps(dataclasses.asdict(settings)))
    )


def _measured(settings: Settings) -> Released:
    import torch

    from moe_cpu.benchmark.end_to_end import model_source
    from moe_cpu.benchmark.end_to_end.experts_clock import ExpertsClock
    from moe_cpu.benchmark.end_to_end.generation import generate
    from moe_cpu.benchmark.end_to_end.prompts import prompt_of
    from moe_cpu.integrations import transformers as integration

    torch.set_num_threads(settings.threads or torch.get_num_threads())
    config = model_source.config_of(settings.source)
    model_source.skeleton(config)  # imports the model's code, which is no part of its weights
    before = high_water.now()
    with high_water.Watch() as watch:
        model = model_source.load(settings.source, config, integration.NAME)
        load = watch.stage()
        report = integration.pack(model, progress=False, release=True)
        pack = watch.stage()
        prompt = prompt_of(model, settings, max(settings.batches))
        with ExpertsClock(model) as clock:
            generate(model, clock, prompt, min(_STEPS, settings.new_tokens))
        run = watch.stage()
    return Released(
        before, load, pack, run, high_water.now(), watch.separate, len(report.taken), len(report.left)
    )


def main(text: str) -> None:
    """What the process does."""
    data: dict[str, Any] = json.loads(text)
    settings = Settings(
        **{
            **data,
            "source": ModelSource(**data["source"]),
            "batches": tuple(data["batches"]),
            "implementations": tuple(data["implementations"]),
        }
    )
    print(json.dumps(dataclasses.asdict(_measured(settings))))


if __name__ == "__main__":
    main(sys.argv[1])
