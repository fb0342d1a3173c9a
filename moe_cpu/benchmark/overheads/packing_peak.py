"""Peak memory of packing when dense experts are let go one by one, in a process of its own, where nothing else has raised the high-water mark.

``python -m moe_cpu.benchmark.overheads.packing_peak SHAPE THREADS`` is that process: it takes a `ModelShape` as JSON and prints a `PackingPeak` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from moe_cpu.benchmark import own_process
from moe_cpu.benchmark.end_to_end import high_water
from moe_cpu.benchmark.overheads.report import PackingPeak
from moe_cpu.models import ModelShape
from moe_cpu.packing import PackedExperts


def measure(shape: ModelShape, threads: int) -> PackingPeak:
    """Of a layer of this shape.

    Raises:
        BackendUnavailable: the process failed, with its last words.
    """
    return PackingPeak(
        **own_process.run(__name__, "packing", json.dumps(dataclasses.asdict(shape)), str(threads))
    )


class _LetGo:
    """Matrices that nobody holds any more once they have been taken."""

    def __init__(self, matrices: list[Tensor]) -> None:
        self._left = matrices[::-1]

    def __len__(self) -> int:
        return len(self._left)

    def __iter__(self) -> Iterator[Tensor]:
        while self._left:
            yield self._left.pop()


def _experts(shape: ModelShape) -> tuple[_LetGo, _LetGo]:
    """Dense experts, each in memory of its own, as a checkpoint on disk has them."""

    def filled(rows: int, cols: int) -> _LetGo:
        return _LetGo([torch.full((rows, cols), float(e), dtype=torch.bfloat16) for e in range(shape.E)])

    return filled(shape.N, shape.K), filled(shape.K, shape.I)


def _measured(shape: ModelShape) -> PackingPeak:
    # Threads, and what is imported on first use, are no part of the weights.
    PackedExperts.pack(*_experts(ModelShape("small", E=1, topk=1, K=64, I=64)))
    before = high_water.now().resident
    w1, w2 = _experts(shape)
    with high_water.Watch() as watch:
        packed = PackedExperts.pack(w1, w2, activation=shape.activation)
        peak = watch.stage().resident - before
    expert = shape.expert_elements * packed.w1.element_size()
    return PackingPeak(shape.E * expert, expert, packed.nbytes, peak)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    print(json.dumps(dataclasses.asdict(_measured(ModelShape(**json.loads(sys.argv[1]))))))
