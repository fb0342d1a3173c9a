"""How fast weights are packed, beside copying them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_cpu import pack_ops
from moe_cpu.benchmark.inputs import DenseLayer, random_layer
from moe_cpu.benchmark.memory import RESERVE, gib, layer_bytes
from moe_cpu.benchmark.overheads.report import Cost, costs
from moe_cpu.benchmark.timing import interleave
from moe_cpu.errors import OutOfMemory
from moe_cpu.models import ModelShape
from moe_cpu.packing import PackedExperts

WHAT = "packing"
# The first so many of what is timed are ours.
_PACKS = 2


def plan(shape: ModelShape, available: int) -> None:
    """Raises OutOfMemory, with the numbers, unless dense weights, two copies and packed weights fit into `available` bytes."""
    needed = 4 * layer_bytes(shape) + RESERVE
    if needed > available:
        raise OutOfMemory(
            f"packing {shape.name}: {gib(needed)} are needed (its dense weights {gib(layer_bytes(shape))}, two copies of them, packed weights, "
            f"{gib(RESERVE)} for everything else), {gib(available)} are available; take a smaller --model, or fewer --experts of it"
        )


def measure(shape: ModelShape, threads: int, seconds: float, seed: int) -> list[Cost]:
    """Packing and copying, each into new memory, whose pages the system has to clear first, and into memory that is there."""
    layer = random_layer(shape, seed)
    dense = (layer.w1, layer.w2)
    packed = PackedExperts.pack(*layer, activation=shape.activation)
    wrong = why_wrong(layer, packed)
    if wrong is not None:
        return [Cost(WHAT, "PackedExperts.pack", threads, wrong=wrong)]
    copies = [torch.empty_like(w) for w in dense]

    def pack_again(*_: Any) -> None:
        for e in range(packed.E):
            pack_ops.pack_expert(layer.w1[e], packed.gate_layout, packed.w1[e])
            pack_ops.pack_expert(layer.w2[e], "none", packed.w2[e])

    calls: dict[str, Callable[..., Any]] = {
        "PackedExperts.pack": lambda *_: PackedExperts.pack(*layer, activation=shape.activation),
        "packing into the same memory": pack_again,
        "copying into the same memory": lambda *_: [to.copy_(w) for to, w in zip(copies, dense, strict=True)],
        "copying to new memory": lambda *_: [w.clone() for w in dense],
    }
    taken = interleave(calls, lambda: None, seconds, lambda _: None, lambda _: None)
    read, written = (sum(w.nbytes for w in weights) for weights in (dense, (packed.w1, packed.w2)))
    packs, copying = list(calls)[:_PACKS], list(calls)[_PACKS:]
    moved = {**dict.fromkeys(packs, read + written), **dict.fromkeys(copying, 2 * read)}
    return costs(WHAT, threads, taken, moved, ours=_PACKS)


def why_wrong(layer: DenseLayer, packed: PackedExperts) -> str | None:
    """A sentence when the first or the last expert cannot be unpacked to what it was."""
    for e in (0, packed.E - 1):
        w1 = pack_ops.unpack_expert(packed.w1[e], packed.N, packed.K, packed.gate_layout)
        w2 = pack_ops.unpack_expert(packed.w2[e], packed.K, packed.I, "none")
        if not (torch.equal(w1, layer.w1[e]) and torch.equal(w2, layer.w2[e])):
            return f"expert {e} is not what it was before it was packed"
    return None
