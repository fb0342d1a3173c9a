"""Which experts the tokens of a measurement go to, from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_cpu.errors import ArgumentError
from moe_cpu.models import ModelShape

# "zipf" may be followed by an exponent: "zipf-1.2".
ROUTINGS = ("uniform", "zipf", "single", "router")
_ZIPF = "zipf"
# Everybody takes the same experts long before that.
_STEEPEST = 100


def check_routing(routing: str) -> None:
    """Raises ArgumentError unless that is the name of a routing, or "zipf-" and a number above 0, at most 100."""
    if routing in ROUTINGS:
        return
    kind, _, exponent = routing.partition("-")
    if kind == _ZIPF and _positive(exponent):
        return
    raise ArgumentError(
        f"routing: expected one of {', '.join(ROUTINGS)}, or zipf-<exponent> with a number above 0, at most {_STEEPEST} (zipf-1.2), got {routing!r}"
    )


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) <= _STEEPEST
    except ValueError:
        return False


def random_routing(
    shape: ModelShape, M: int, routing: str, rng: torch.Generator, popularity_seed: int
) -> tuple[Tensor, Tensor]:
    """Router weights `[M, topk]` float32 that sum to one and ids `[M, topk]` int32, different within a row.

    Experts are drawn without replacement by adding Gumbel noise to the logarithm of their popularity and taking the topk largest
    (Source: Kool, van Hoof, Welling 2019, "Stochastic beams and where to find them"). The r-th most popular expert has popularity r**-exponent under
    "zipf". Which experts are popular depends on `popularity_seed` alone, so all calls of one case agree about it.

    Raises:
        ArgumentError: an unknown name, or "router", which only a checkpoint has.
    """
    check_routing(routing)
    if routing == "router":
        raise ArgumentError(
            "routing: 'router' runs the router of a checkpoint, and none was given; take uniform, zipf or single"
        )
    E, topk = shape.E, shape.topk
    logits = torch.zeros(E, device=rng.device)
    if routing.startswith(_ZIPF):
        exponent = float(routing.partition("-")[2] or 1)
        order = torch.randperm(E, generator=torch.Generator().manual_seed(popularity_seed)).to(rng.device)
        logits[order] = torch.arange(1, E + 1, dtype=torch.float32, device=rng.device).log() * -exponent
    noise = -torch.empty((M, E), device=rng.device).exponential_(generator=rng).log_()
    if routing == "single":
        noise = noise[:1].expand(M, E)
    scores, ids = (logits + noise).topk(topk, dim=-1)
    return scores.softmax(dim=-1).contiguous(), ids.to(torch.int32).contiguous()
