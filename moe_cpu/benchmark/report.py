"""Results of a run: rows, a table of them, and the JSON file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from moe_cpu.benchmark.case import Case
from moe_cpu.benchmark.memory import scratch_bound
from moe_cpu.benchmark.roofline import Ceilings, Work
from moe_cpu.benchmark.saved import SavedReport
from moe_cpu.benchmark.timing import Comparison, Times
from moe_cpu.models import ModelShape

K = TypeVar("K", bound=Hashable)

OK, SKIPPED, WRONG, FAILED = "ok", "skipped", "wrong", "failed"


@dataclass(frozen=True)
class Skew:
    """A routing beside the uniform one, of the same contender on as many tokens, in the same rounds.

    Attributes:
        time: how many times as long a call takes.
        limit: how many times as long the least time is; what the ceilings predict for `time`.
    """

    time: Comparison
    limit: float

    @property
    def excess(self) -> float:
        """What a call takes beyond the prediction, as a share of it."""
        return self.time.ratio / self.limit - 1


@dataclass
class Row:
    """One case and what came of it.

    Attributes:
        case: what was to be measured.
        isa: the instruction set that ran, for our native backend; None where the contender does not say.
        ours: whether the contender is one of our backends.
        status: "ok", "skipped" (cannot run here), "wrong" (the answer failed the check, so there is no time) or "failed" (it raised).
        reason: a sentence, for every status but "ok".
        relative_error: of the checked tokens, against float64.
        times: seconds.
        work: median over the calls of what they had to do.
        limit: least seconds under the ceilings; None without ceilings.
        binding: "compute" or "memory".
        comparison: with the suite's baseline.
        skew: beside uniform routing; None for that itself, without it, or without ceilings.
        layers: layers of weights that calls took turns on.
        evicted: whether the cache was emptied before each call, because the layers alone would not have done it.
        scratch: bytes that a call works in beside arguments and result; None where the contender does not say.
    """

    case: Case
    isa: str | None = None
    ours: bool = False
    status: str = OK
    reason: str | None = None
    relative_error: float | None = None
    times: Times | None = None
    work: Work | None = None
    limit: float | None = None
    binding: str | None = None
    comparison: Comparison | None = None
    skew: Skew | None = None
    layers: int = 0
    evicted: bool = False
    scratch: int | None = None

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.times is None else self.case.M / self.times.median

    @property
    def flops(self) -> float | None:
        """FLOP/s of routed work."""
        return None if self.times is None or self.work is None else self.work.flops / self.times.median

    @property
    def bandwidth(self) -> float | None:
        """Bytes/s of routed work."""
        return None if self.times is None or self.work is None else self.work.bytes / self.times.median

    @property
    def efficiency(self) -> float | None:
        """Share of the binding ceiling, least time / median."""
        return None if self.times is None or self.limit is None else self.limit / self.times.median

    @property
    def scratch_bound(self) -> int:
        """Bytes that `scratch` may be for a native kernel."""
        return scratch_bound(self.case.shape, self.case.M)


@dataclass
class Report(SavedReport):
    """Rows and what they were measured under.

    Attributes:
        environment: see `moe_cpu.benchmark.environment.describe`.
        ceilings: with as many threads as `environment` says, the most that were used; None when there was no native library to measure them with.
        fewer_threads: the same with each smaller number of threads that every point was measured with.
        notes: sentences a reader should know, for example that memory was too short for enough layers.
    """

    environment: dict[str, Any]
    ceilings: Ceilings | None
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fewer_threads: list[Ceilings] = field(default_factory=list)

    @property
    def thread_counts(self) -> list[int]:
        """Numbers of threads that points were measured with, least first."""
        return sorted({row.case.threads for row in self.rows})

    @property
    def ok(self) -> bool:
        """Whether no backend of ours gave a wrong answer or raised."""
        return not any(row.ours and row.status in (WRONG, FAILED) for row in self.rows)

    @classmethod
    def parts(cls, data: dict[str, Any]) -> dict[str, Any]:
        ceilings = data["ceilings"]
        return {
            **data,
            "ceilings": None if ceilings is None else Ceilings(**ceilings),
            "rows": [_row(row) for row in data["rows"]],
            "fewer_threads": [Ceilings(**one) for one in data.get("fewer_threads", ())],
        }


def _row(data: dict[str, Any]) -> Row:
    case = {**data["case"], "shape": ModelShape(**data["case"]["shape"])}
    parts: dict[str, Any] = {
        name: None if data[name] is None else kind(**data[name])
        for name, kind in (("times", Times), ("work", Work), ("comparison", Comparison))
    }
    if data.get("skew") is not None:
        parts["skew"] = Skew(Comparison(**data["skew"]["time"]), data["skew"]["limit"])
    return Row(**{**data, **parts, "case": Case(**case)})


def grouped(rows: Iterable[Row], key: Callable[[Row], K]) -> dict[K, list[Row]]:
    """Rows by key, both in the order in which they come."""
    out: dict[K, list[Row]] = {}
    for row in rows:
        out.setdefault(key(row), []).append(row)
    return out
