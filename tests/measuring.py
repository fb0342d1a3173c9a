from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from moe_cpu.benchmark import Suite, environment, memory, roofline
from moe_cpu.benchmark.baselines import BASELINES
from moe_cpu.benchmark.baselines.torch_loop import TorchLoop
from moe_cpu.benchmark.inputs import Inputs
from moe_cpu.models import ModelShape

# Arguments of the command line for a measurement of a moment.
TINY = ["bench", "--shape", "4,2,64,48", "--tokens", "1,3", "--seconds", "0.01", "--threads", "1"]
SHAPE = ModelShape("tiny", E=6, topk=2, K=64, I=48)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of a moment over a few MiB instead of a gigabyte, a cache of 256 KiB, and no second spent on the CPU's name."""
    monkeypatch.setattr(roofline, "probe_bytes", lambda cache: 1 << 22)
    monkeypatch.setattr(roofline, "measure", functools.partial(roofline.measure, seconds=0.01))
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 1 << 18)
    monkeypatch.setattr(environment, "_brand_by_cpuinfo", lambda: None)


def suite(**changes: Any) -> Suite:
    return Suite(
        **{
            "shapes": (SHAPE,),
            "tokens": (5,),
            "contenders": ("native",),
            "baseline": "torch_loop",
            "seconds": 0.01,
            "threads": 1,
            "cold": False,
        }
        | changes
    )


def add_contender(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[Tensor, Inputs], Any], ours: bool = False
) -> list[int]:
    """A contender "odd" that gives `answer(right answer, inputs)`. Returns the list its calls are noted in, tokens of each."""
    calls: list[int] = []

    class Odd(TorchLoop):
        name = "odd"

        def run(self, prepared: Any, inputs: Inputs, shape: ModelShape) -> Any:
            calls.append(inputs.x.shape[0])
            return answer(super().run(prepared, inputs, shape), inputs)

    Odd.ours = ours
    monkeypatch.setitem(BASELINES, "odd", Odd)
    return calls
