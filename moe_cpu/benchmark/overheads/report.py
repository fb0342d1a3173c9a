"""Results of measuring overheads, and their JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from moe_cpu.benchmark.saved import SavedReport
from moe_cpu.benchmark.timing import Comparison, Times, compare, summarise


@dataclass
class Cost:
    """Calls of one kind.

    Attributes:
        what: the group it was measured in; all of a group took turns.
        name: what was called.
        threads: OpenMP threads.
        times: seconds; None when the answer was wrong.
        bytes: read and written by one call; None where they say nothing.
        beside: by the name of another of its group, how many times as long as that one it took.
        wrong: what is wrong with the answer, or None.
    """

    what: str
    name: str
    threads: int
    times: Times | None = None
    bytes: int | None = None
    beside: dict[str, Comparison] = field(default_factory=dict)
    wrong: str | None = None

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s."""
        return None if self.times is None or self.bytes is None else self.bytes / self.times.median


@dataclass(frozen=True)
class PackingPeak:
    """Memory of a process that packs a layer and lets go of every dense expert once it is packed.

    Attributes:
        dense, expert, packed: bytes of all dense experts, of one of them, and of the packed weights.
        peak: the most bytes the process held while it packed, beyond what it held before there were weights.
    """

    dense: int
    expert: int
    packed: int
    peak: int


@dataclass
class OverheadsReport(SavedReport):
    """Everything measured.

    Attributes:
        environment: as `moe_cpu.benchmark.environment.describe` has it.
        packed_layer: name of the shape that was packed.
        costs: group by group.
        peak: None when its process failed; a note says so.
        notes: sentences a reader should know.
    """

    kind: ClassVar[str] = "overheads"

    environment: dict[str, Any]
    packed_layer: str
    costs: list[Cost] = field(default_factory=list)
    peak: PackingPeak | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every answer was right and memory could be measured."""
        return self.peak is not None and not any(cost.wrong for cost in self.costs)

    @classmethod
    def parts(cls, data: dict[str, Any]) -> dict[str, Any]:
        peak = None if data["peak"] is None else PackingPeak(**data["peak"])
        return {**data, "costs": [_cost(cost) for cost in data["costs"]], "peak": peak}


def _cost(data: dict[str, Any]) -> Cost:
    times = None if data["times"] is None else Times(**data["times"])
    beside = {name: Comparison(**comparison) for name, comparison in data["beside"].items()}
    return Cost(**{**data, "times": times, "beside": beside})


def costs(
    what: str, threads: int, taken: Mapping[str, Sequence[float]], moved: Mapping[str, int], ours: int = 1
) -> list[Cost]:
    """A group whose first `ours` members are compared with the others.

    Args:
        taken: seconds of each, call by call in the same rounds.
        moved: bytes that one call reads and writes, for those about whom that says something.
    """
    out = [Cost(what, name, threads, summarise(taken[name]), moved.get(name)) for name in taken]
    for cost in out[:ours]:
        cost.beside = {other.name: compare(taken[other.name], taken[cost.name]) for other in out[ours:]}
    return out
