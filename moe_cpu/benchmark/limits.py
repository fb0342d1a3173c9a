"""Numbers that a measurement may be asked for."""

from __future__ import annotations

import math
from typing import Any

from moe_cpu.errors import ArgumentError

# OpenMP starts as many as it is told, and torch's products end in a segmentation fault with 2048.
_MOST_THREADS = 1024
# Seeds are multiplied and added to, and torch takes 64 bits.
_SEEDS = 2**32


def check_threads(*counts: Any) -> None:
    """Raises ArgumentError unless these are different numbers of threads, at least one."""
    good = all(isinstance(n, int) and 1 <= n <= _MOST_THREADS for n in counts)
    if not good or not counts or len(set(counts)) < len(counts):
        raise ArgumentError(
            f"threads: expected different whole numbers from 1 to {_MOST_THREADS}, got {', '.join(map(repr, counts)) or 'none'}"
        )


def check_seconds(seconds: Any) -> None:
    """Raises ArgumentError unless it is a time that ends."""
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ArgumentError(f"seconds: expected a finite number above 0, got {seconds!r}")


def check_seed(seed: Any) -> None:
    """Raises ArgumentError unless random numbers can start from it."""
    if not isinstance(seed, int) or not 0 <= seed < _SEEDS:
        raise ArgumentError(f"seed: expected a whole number from 0 to 2^32 - 1, got {seed!r}")
