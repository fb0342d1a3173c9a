"""Takes times of contenders in turn, with weights that are not in the cache, and summarises them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)

MIN_CALLS, MAX_CALLS = 5, 200


@dataclass(frozen=True)
class Times:
    """Seconds of one contender's calls at one point: median, 10th and 90th percentile, and the number of calls."""

    median: float
    p10: float
    p90: float
    n: int


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of `values` lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summarise(seconds: Sequence[float]) -> Times:
    """`Times` of a list of calls."""
    return Times(percentile(seconds, 0.5), percentile(seconds, 0.1), percentile(seconds, 0.9), len(seconds))


@dataclass(frozen=True)
class Comparison:
    """How many times faster than the baseline, call by call: the median of the ratios and its 95 % confidence interval.

    `verdict` is "better" or "worse" when the whole interval lies on that side of 1, else "within noise".
    """

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.low > 1:
            return "better"
        return "worse" if self.high < 1 else "within noise"


def compare(ours: Sequence[float], baseline: Sequence[float]) -> Comparison:
    """Compares calls that were made side by side.

    The interval of the median is taken between order statistics n/2 -+ 1.96 * sqrt(n)/2, the normal form of the binomial one; it assumes
    nothing about how times are distributed (Source: Conover, "Practical Nonparametric Statistics", on quantiles).
    """
    ratios = sorted(b / a for a, b in zip(ours, baseline, strict=True))
    n = len(ratios)
    half = 1.96 * math.sqrt(n) / 2
    low = max(0, math.floor((n - 1) / 2 - half))
    high = min(n - 1, math.ceil((n - 1) / 2 + half))
    return Comparison(percentile(ratios, 0.5), ratios[low], ratios[high])


class CacheEvictor:
    """Reads twice the last-level cache, so that what was in it no longer is. Holds that much memory."""

    def __init__(self, cache_bytes: int) -> None:
        self.data = torch.ones(2 * cache_bytes // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self.data.sum()


def interleave(
    calls: dict[Key, Callable[[Any, int], Any]],
    new_inputs: Callable[[], Any],
    seconds: float,
    before: Callable[[Key], None],
    after: Callable[[Key], None],
) -> dict[Key, list[float]]:
    """Times every contender on the same inputs, one after the other, until the time is used up.

    Args:
        calls: name -> function of (inputs, round number); the round number picks the layer of weights.
        new_inputs: makes the inputs of a round, not timed.
        seconds: of the whole loop; at least `MIN_CALLS` rounds are made, at most `MAX_CALLS`.
        before, after: called around each call, not timed.

    Returns: seconds of each call by contender, all lists of one length, call i of each on the same inputs. Who starts a round changes from round
    to round. One round more is made at the beginning and not counted: threads wake up and scratch memory is got.
    """
    names = list(calls)
    taken: dict[Key, list[float]] = {name: [] for name in names}
    end = math.inf
    for number in range(MAX_CALLS + 1):
        if number == 1:
            end = time.perf_counter() + seconds
        if number > MIN_CALLS and time.perf_counter() >= end:
            break
        inputs = new_inputs()
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            before(name)
            start = time.perf_counter()
            calls[name](inputs, number)
            elapsed = time.perf_counter() - start
            after(name)
            if number > 0:
                taken[name].append(elapsed)
    return taken
