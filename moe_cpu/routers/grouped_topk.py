"""Experts in groups, of which a token may use only the best few: DeepSeek-V2 and V3."""

from __future__ import annotations

import torch

from moe_cpu.errors import ArgumentError, shape_error, unknown_name_error
from moe_cpu.routers.selection import Routing, float32_logits, largest, normalized

SCORING_FUNCS = ("softmax", "sigmoid")


def grouped_topk(
    router_logits: torch.Tensor,
    topk: int,
    num_expert_group: int,
    topk_group: int,
    renormalize: bool = True,
    scoring_func: str = "softmax",
    e_score_correction_bias: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> Routing:
    """The topk best experts among those of the `topk_group` best groups; the weights are their scores.

    s = softmax(logits) or sigmoid(logits); c = s + e_score_correction_bias decides, s weighs. A group is as good as its
    best c, or, with a bias, as the sum of its two best. Experts of other groups are out, however bad the rest may be.

    Args:
        router_logits: `[M, E]` bf16, fp16 or fp32.
        topk: experts per token, at most the experts of `topk_group` groups.
        num_expert_group: groups of E / num_expert_group consecutive experts.
        topk_group: groups a token may use.
        renormalize: divide each token's weights by their sum.
        scoring_func: "softmax" (V2) or "sigmoid" (V3).
        e_score_correction_bias: `[E]` (V3), used to select and never to weigh; None = no bias.
        routed_scaling_factor: multiplies the weights at the end.
    Returns: `Routing`, weights `[M, topk]` float32 and ids `[M, topk]` int32, best first, lowest id first among equals.
    Raises: ShapeError, DTypeError, ArgumentError.
    Numerics: scores, choice and weights in float32. Scores are compared after softmax or sigmoid, whose rounding may make ties of different logits.
    Source: DeepSeek-V2 (arXiv:2405.04434) section 2.2.2, DeepSeek-V3 (arXiv:2412.19437) section 2.1.2.
    """
    logits = float32_logits(router_logits, topk)
    M, E = logits.shape
    check_groups(E, topk, num_expert_group, topk_group)
    if scoring_func == "softmax":
        scores = torch.softmax(logits, dim=-1)
    elif scoring_func == "sigmoid":
        scores = torch.sigmoid(logits)
    else:
        raise unknown_name_error("scoring_func", scoring_func, SCORING_FUNCS)
    members = E // num_expert_group
    choice = scores.detach()
    if e_score_correction_bias is not None:
        if tuple(e_score_correction_bias.shape) != (E,):
            raise shape_error("e_score_correction_bias", "[E]", (E,), e_score_correction_bias.shape)
        choice = choice + e_score_correction_bias.detach().float()
    grouped = choice.view(M, num_expert_group, members)
    if e_score_correction_bias is None:
        group_scores = grouped.amax(dim=-1)
    else:
        group_scores = torch.topk(grouped, min(2, members), dim=-1).values.sum(dim=-1)
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(
        1, largest(group_scores, topk_group), True
    )
    # With a bias a score may be negative, so an expert of another group must rank below every number.
    choice = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).view(M, E)
    ids = largest(choice, topk)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = normalized(weights)
    return Routing(weights * routed_scaling_factor, ids.int())


def check_groups(E: int, topk: int, num_expert_group: int, topk_group: int) -> None:
    """Raises ArgumentError unless topk experts can be chosen from topk_group of num_expert_group equal groups."""
    if num_expert_group < 1 or E % num_expert_group:
        raise ArgumentError(f"num_expert_group: expected a divisor of E = {E}, got {num_expert_group}")
    if not 1 <= topk_group <= num_expert_group:
        raise ArgumentError(
            f"topk_group: expected 1 <= topk_group <= num_expert_group = {num_expert_group}, got {topk_group}"
        )
    if topk > topk_group * (E // num_expert_group):
        raise ArgumentError(
            f"topk: expected at most {topk_group * (E // num_expert_group)}, the experts of topk_group = {topk_group} "
            f"groups of {E // num_expert_group}, got {topk}"
        )
