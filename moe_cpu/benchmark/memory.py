"""How much memory a suite needs, worked out before any of it is taken."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_cpu import machine, ops
from moe_cpu.benchmark.contender import Contender
from moe_cpu.errors import OutOfMemory
from moe_cpu.models import ModelShape

_BF16 = 2
_F32 = 4
# Left for the rest of the system and for what contenders allocate during a call.
RESERVE = 1 << 30
# What the native kernels promise to work in, beside what grows with the tokens: the rows that all threads have gathered.
_SCRATCH = 64 << 20
# With more layers than these the time goes into making weights.
_MAX_LAYERS = 16
_CGROUP = Path("/sys/fs/cgroup")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True)
class Plan:
    """Memory of one shape.

    Attributes:
        layers: layers of weights that calls take turns on.
        needed: bytes at the peak.
        available: bytes that could be had when it was planned.
        wanted_layers: layers whose weights exceed twice the last-level cache; more than `layers` when memory is short.
    """

    layers: int
    needed: int
    available: int
    wanted_layers: int

    def notes(self, shape: ModelShape, cache_bytes: int) -> Iterator[str]:
        """Says so when there are fewer layers than wanted."""
        if self.layers < self.wanted_layers:
            yield (
                f"{shape.name}: memory holds {self.layers} of the {self.wanted_layers} layers whose weights exceed twice the last-level cache "
                f"of {cache_bytes / 2**20:.0f} MiB; the cache was emptied before each call instead"
            )


def available_bytes() -> int:
    """Bytes this process can still get: what the kernel calls available, or the control group's limit if that is less."""
    free = math.inf
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or no limit ("max")
    return max(0, int(free))


def last_level_cache_bytes() -> int:
    """Size of the largest cache that the first CPU sees; from CPUID where a container hides what the system knows; 0 when neither says."""
    sizes = [0]
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * unit)
    if max(sizes) == 0 and ops.available():
        sizes = [*machine.cpu_description()["cache_bytes"].values()]
    return max(sizes)


def layer_bytes(shape: ModelShape) -> int:
    """Bytes of one layer's dense weights and biases."""
    biases = shape.E * (shape.N + shape.K) * _F32 if shape.has_bias else 0
    return shape.E * shape.expert_elements * _BF16 + biases


def scratch_bound(shape: ModelShape, M: int) -> int:
    """Bytes of scratch memory that a call of the native kernels may take: 64 MiB, and for each pair of a token and an expert a bf16 row of both products."""
    return _SCRATCH + M * shape.topk * (shape.K + shape.I) * _BF16


def plan(
    shape: ModelShape, M: int, contenders: Sequence[Contender], cache_bytes: int, extra: int, available: int
) -> Plan:
    """How many layers to keep so that their weights exceed twice the cache, as far as memory allows.

    Args:
        M: the largest number of tokens.
        extra: bytes held beside weights and tokens, for example by a `CacheEvictor`.
        available: bytes that may be used.

    Raises:
        OutOfMemory: not even one layer fits; the message has the numbers.
    """
    one = layer_bytes(shape)
    copies = sum(c.copies for c in contenders) + any(c.keeps_dense for c in contenders)
    # The first layer's dense weights stay for checking; a layer being made is there twice.
    fixed = 2 * one + _call_bytes(shape, M) + extra + RESERVE
    wanted = min(_MAX_LAYERS, max(1, math.ceil(2 * cache_bytes / one)))
    affordable = (available - fixed) // max(1, copies * one)
    if affordable < 1:
        raise OutOfMemory(
            f"{shape.name} with M = {M}: {gib(fixed + copies * one)} are needed (weights of one layer {gib(one)}, "
            f"{copies} layouts of them for {', '.join(c.name for c in contenders)}), {gib(available)} are available; "
            "take fewer contenders, a smaller shape or fewer experts"
        )
    layers = min(wanted, affordable)
    return Plan(layers, fixed + layers * copies * one, available, wanted)


def _call_bytes(shape: ModelShape, M: int) -> int:
    """Upper bound of what one call and its check hold: torch's own paths keep each pair's rows in bf16 and float32 several times over."""
    rows = M * shape.topk
    return rows * (2 * shape.N + 4 * shape.K) * _F32 + 4 * shape.E * M * _F32


def gib(size: float) -> str:
    """`2.50 GiB`."""
    return f"{size / 2**30:.2f} GiB"
