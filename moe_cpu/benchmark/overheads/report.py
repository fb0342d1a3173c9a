"""Results of measuring overheads, and their JSON file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_cpu.benchmark.report import read_json
from moe_cpu.benchmark.timing import Comparison, Times, compare, summarise
from moe_cpu.errors import ArgumentError

# What tells these files from those of layers.
KIND = "overheads"
# Raised when the meaning of a field changes.
SCHEMA = 1


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
class OverheadsReport:
    """Everything measured.

    Attributes:
        environment: as `moe_cpu.benchmark.environment.describe` has it.
        packed_layer: name of the shape that was packed.
        costs: group by group.
        peak: None when its process failed; a note says so.
        notes: sentences a reader should know.
    """

    environment: dict[str, Any]
    packed_layer: str
    costs: list[Cost] = field(default_factory=list)
    peak: PackingPeak | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every answer was right and memory could be measured."""
        return self.peak is not None and not any(cost.wrong for cost in self.costs)

    def save(self, path: str | Path) -> None:
        """Writes the JSON file, and the folders above it if they are missing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        data = {"kind": KIND, "schema": SCHEMA, **dataclasses.asdict(self)}
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> OverheadsReport:
        """Reads a JSON file that `save` wrote.

        Raises:
            ArgumentError: it is not one.
        """
        data = read_json(path)
        found = (data.pop("kind", None), data.pop("schema", None))
        if found != (KIND, SCHEMA):
            raise ArgumentError(f"results: expected kind {KIND!r} and schema {SCHEMA} in {path}, got {found}")
        try:
            data["costs"] = [_cost(cost) for cost in data["costs"]]
            data["peak"] = None if data["peak"] is None else PackingPeak(**data["peak"])
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"results: {path} cannot be read: {error}") from error


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
