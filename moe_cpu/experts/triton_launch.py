"""How the Triton kernels are launched: one small table by shape class, and the arithmetic around it.

A class is the number of rows that an expert gets on average, M * topk / E. Few rows: the GPU reads weights and little else, so a tile has few rows, is
deep in K, and many loads are under way. Many rows: the matrix units decide, so tiles are as large as registers hold, and neighbours share operands in L2.

To tune for another GPU or shape: ``python -m moe_cpu.experts.triton_tune --model NAME --tokens M,...`` measures candidates around the table and prints
the best of each class as a line of it. A plan can be tried without changing the table: ``TritonExperts(plan=Plan(...))``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Launch:
    """One kernel's launch.

    Attributes:
        n, k: columns of a tile of the result, and depth of one step of its loop. The first GEMM makes n columns of gate and n of up at a time.
        warps, stages: warps of a program; steps of the loop whose loads are under way together.
        group: row blocks whose tiles run next to each other, so that they find each other's weights in L2.
        tma: weights come through the copy engine (compute capability 9.0 or more, dimensions that fit) instead of the threads' own loads.
    """

    n: int
    k: int
    warps: int
    stages: int
    group: int = 8
    tma: bool = False


@dataclass(frozen=True)
class Plan:
    """Rows of a block, which both GEMMs share, and their launches."""

    m: int
    first: Launch
    second: Launch


# Average rows of an expert up to which a plan holds, and the plan; the last one holds for everything above. Measured on an H200, on the shapes of Mixtral 8x7B,
# DeepSeek-V3 (64 experts), gpt-oss-20b and Qwen3-30B-A3B from 1 to 16384 tokens; on each of them the plan is within a few per cent of the best one found.
# Through the copy engine weights do not pass through the threads' registers, which pays from larger tiles on; for the smallest it does not cover the
# host's work on descriptors.
# fmt: off
TABLE: tuple[tuple[float, Plan], ...] = (
    (12,           Plan( 16, Launch( 64, 128, 4, 3),           Launch( 64, 128, 4, 4))),
    (24,           Plan( 32, Launch( 64, 128, 4, 3),           Launch(128, 128, 4, 3, 8, True))),
    (90,           Plan( 64, Launch(128,  64, 4, 4, 8, True),  Launch(256,  64, 4, 4, 8, True))),
    (float("inf"), Plan(128, Launch(128,  64, 8, 4, 32, True), Launch(256,  64, 8, 4, 8, True))),
)
# fmt: on

# Pairs of token and slot, as a share of the experts, up to which sorting them by expert is not worth a kernel: hardly two of them meet.
UNSORTED_SHARE = 4


def plan_for(rows: int, experts: int) -> Plan:
    """The plan for `rows` pairs spread over `experts`."""
    average = rows / max(experts, 1)
    return next(plan for limit, plan in TABLE if average <= limit)


def sorts(M: int, topk: int, experts: int) -> bool:
    """Whether pairs are sorted by expert; if not, each is a block of its own. One token meets no expert twice."""
    return M > 1 and M * topk * UNSORTED_SHARE > experts


def blocks_bound(pairs: int, experts: int, m: int) -> int:
    """Most row blocks that `pairs` can need: sum over experts of ceil(count / m), each block with at least one pair."""
    return min(pairs, (pairs + experts * (m - 1)) // m)


def fitted(launch: Launch, m: int, operands: int, element_size: int, shared_memory: int) -> Launch:
    """`launch` with as many stages as the GPU's shared memory holds.

    Args:
        m: rows of a block.
        operands: weight tiles of a step, 2 for gate and up.
        shared_memory: bytes that one program may have.
    """
    step = (m + operands * launch.n) * launch.k * element_size
    # The matrix units still read one step while the loads of the others are under way; a kilobyte is left for barriers.
    stages = max(1, min(launch.stages, (shared_memory - 1024) // step))
    return launch if stages == launch.stages else replace(launch, stages=stages)
