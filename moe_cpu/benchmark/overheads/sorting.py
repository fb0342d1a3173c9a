"""What sorting the ids of a long prefill by expert takes, beside copying them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_cpu import moe_align_block_size
from moe_cpu.benchmark.inputs import generator
from moe_cpu.benchmark.overheads.report import Cost, costs
from moe_cpu.benchmark.routing import random_routing
from moe_cpu.benchmark.timing import interleave
from moe_cpu.models import ModelShape

WHAT = "sorting ids"
TOKENS, BLOCK = 65536, 64
SHAPE = ModelShape("ids", E=256, topk=8, K=1, I=1)
# Different ids from round to round, few enough that drawing them takes no time.
_DRAWN = 4


def measure(threads: int, seconds: float, seed: int) -> list[Cost]:
    """`moe_align_block_size` of 65536 x 8 ids beside copying these ids into memory that is there, and into new memory, as its results are."""
    rng = generator(seed)
    drawn = [random_routing(SHAPE, TOKENS, "uniform", rng, seed)[1] for _ in range(_DRAWN)]
    name = f"moe_align_block_size, {TOKENS} x {SHAPE.topk} ids, E={SHAPE.E}"
    wrong = why_wrong(drawn[0], *_align(drawn[0]))
    if wrong is not None:
        return [Cost(WHAT, name, threads, wrong=wrong)]
    target, size = torch.empty_like(drawn[0]), drawn[0].nbytes

    def new_inputs() -> Tensor:
        drawn.append(drawn.pop(0))
        return drawn[0]

    def align(ids: Tensor, _: int) -> Any:
        return _align(ids)

    calls = {
        name: align,
        "copying them": lambda ids, _: target.copy_(ids),
        "copying them to new memory": lambda ids, _: ids.clone(),
    }
    taken = interleave(calls, new_inputs, seconds, lambda _: None, lambda _: None)
    return costs(WHAT, threads, taken, dict.fromkeys(list(calls)[1:], 2 * size))


def _align(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return moe_align_block_size(ids, BLOCK, SHAPE.E)


def why_wrong(ids: Tensor, sorted_ids: Tensor, expert_ids: Tensor, used: Tensor) -> str | None:
    """A sentence when some pair is missing, comes twice, or stands in a block of another expert."""
    places = sorted_ids[: int(used)].long()
    real = places < ids.numel()
    if not torch.equal(places[real].sort().values, torch.arange(ids.numel())):
        return f"expected each of {ids.numel()} pairs once, got {int(real.sum())}, or one of them twice"
    owners = expert_ids.repeat_interleave(BLOCK)[: len(places)]
    if not torch.equal(ids.flatten()[places[real]], owners[real]):
        return "a pair stands in a block of another expert"
    return None
