"""The machine's limits, measured in the same run, and the least time a call could take under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from moe_cpu import isa, machine, ops
from moe_cpu.models import ModelShape

_BF16 = 2
_F32 = 4
# Long enough for the clock to settle under matrix load, short enough that all ISAs of a run take a second or two.
_PROBE_SECONDS = 0.3
_PROBE_BYTES = 1 << 30


@dataclass(frozen=True)
class Work:
    """What a call must do at least: products of routed pairs, and bytes of the experts that were chosen, of the tokens and of the result."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Ceilings:
    """Limits of this machine with `threads` threads.

    Attributes:
        matrix: FLOP/s of each instruction set measured, on random operands held in registers.
        read: bytes/s of reading memory in order.
        threads: how many threads both were measured with.
    """

    matrix: dict[str, float]
    read: float
    threads: int

    def peak(self, isa_name: str | None) -> float:
        """FLOP/s of that instruction set; of the best one measured for a contender that is tied to none."""
        return self.matrix[isa_name] if isa_name in self.matrix else max(self.matrix.values())

    def limit(self, work: Work, isa_name: str | None) -> tuple[float, str]:
        """Least seconds for `work`, max(FLOP / peak, bytes / bandwidth), and which of the two binds: "compute" or "memory"."""
        compute, memory = work.flops / self.peak(isa_name), work.bytes / self.read
        return max(compute, memory), "compute" if compute >= memory else "memory"


def measure(
    threads: int, isas: set[str], cache_bytes: int, seconds: float = _PROBE_SECONDS
) -> Ceilings | None:
    """Measures the ceilings of the best instruction set and of `isas`; None when there is no native library to measure with.

    Memory: holds a buffer of 1 GiB, or twice the last-level cache if that is more, while it reads it.
    """
    if not ops.available() or not isa.available():
        return None
    names = {isa.active()} | isas
    matrix = {
        name: machine.probe_matrix_peak(name, threads, seconds) for name in isa.names() if name in names
    }
    return Ceilings(matrix, machine.probe_read_bandwidth(threads, probe_bytes(cache_bytes), seconds), threads)


def probe_bytes(cache_bytes: int) -> int:
    """Size of the buffer that `measure` reads."""
    return max(_PROBE_BYTES, 2 * cache_bytes)


def routed_work(shape: ModelShape, topk_ids: Tensor) -> Work:
    """Work of one call. Pairs with id -1 count nothing; padding and repeated reads never count."""
    routed = topk_ids[topk_ids >= 0]
    pairs, distinct = routed.numel(), routed.unique().numel()
    expert_bytes = shape.expert_elements * _BF16 + ((shape.N + shape.K) * _F32 if shape.has_bias else 0)
    tokens = topk_ids.shape[0]
    return Work(
        2.0 * pairs * shape.expert_elements, float(distinct * expert_bytes + 2 * tokens * shape.K * _BF16)
    )


def median_work(works: Sequence[Work]) -> Work:
    """Median of the products and of the bytes of several calls."""
    return Work(median(w.flops for w in works), median(w.bytes for w in works))
