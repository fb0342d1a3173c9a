"""What the native library sees of this machine, and the ceilings it measures there."""

from __future__ import annotations

from typing import Any

import torch

from moe_cpu import native_library as native
from moe_cpu.errors import IsaUnavailable
from moe_cpu.ops import isa_why_not, isas


def cpu_description() -> dict[str, Any]:
    """What the library sees of this machine: feature bits, cache bytes of one core, threads, the OpenMP runtime mapped, ISAs with reasons."""
    lib = native.library()
    with open("/proc/self/maps") as maps:
        runtimes = sorted(
            {line.split()[-1] for line in maps if "libgomp" in line or "libomp" in line or "libiomp" in line}
        )
    return {
        "features": lib.moe_cpu_features().decode().split(),
        "cache_bytes": {f"L{level}": lib.moe_cache_bytes(level) for level in (1, 2, 3)},
        "threads": torch.get_num_threads(),
        "team": lib.moe_parallel_team(torch.get_num_threads()),
        "openmp_runtimes": runtimes,
        "isas": {name: isa_why_not(name) for name in isas()},
    }


def probe_matrix_peak(isa: str, threads: int, seconds: float = 0.2) -> float:
    """FLOP/s of that ISA's products on random operands that never leave the registers, over `threads` threads."""
    if isa_why_not(isa) is not None:
        raise IsaUnavailable(f"isa = {isa}: {isa_why_not(isa)}")
    return float(native.library().moe_probe_matrix_peak(isas().index(isa), threads, seconds))


def probe_read_bandwidth(threads: int, size: int = 1 << 30, seconds: float = 0.3) -> float:
    """Bytes/s of plain sequential reads of a buffer of `size` bytes, shared out over `threads` threads."""
    data = torch.ones(size // 8, dtype=torch.int64)
    return float(
        native.library().moe_probe_read_bandwidth(data.data_ptr(), data.numel() * 8, threads, seconds)
    )


def probe_copy_bandwidth(threads: int, size: int = 1 << 29, seconds: float = 0.3) -> float:
    """Bytes/s, read plus written, of copying `size` bytes with `threads` threads."""
    source, target = torch.ones(size // 8, dtype=torch.int64), torch.zeros(size // 8, dtype=torch.int64)
    return float(
        native.library().moe_probe_copy_bandwidth(
            source.data_ptr(), target.data_ptr(), source.numel() * 8, threads, seconds
        )
    )
