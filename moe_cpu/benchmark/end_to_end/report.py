"""Results of an end-to-end measurement, and their JSON file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from moe_cpu.benchmark.end_to_end.high_water import Bytes
from moe_cpu.benchmark.report import FAILED, OK, WRONG
from moe_cpu.benchmark.saved import SavedReport
from moe_cpu.benchmark.timing import Comparison, Times


@dataclass
class Phase:
    """Calls of one kind: "prefill" (the whole prompt, until the first token is chosen) or "decode" (one token of every sequence).

    Attributes:
        tokens: of one call, all sequences together.
        whole, experts: seconds of a call, and those inside experts modules.
        experts_share: median over the calls of experts / whole.
        whole_comparison, experts_comparison: with the first implementation, call by call; None for itself.
    """

    name: str
    tokens: int
    whole: Times
    experts: Times
    experts_share: float
    whole_comparison: Comparison | None = None
    experts_comparison: Comparison | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.whole.median


@dataclass
class Agreement:
    """How an implementation's answers compare with the first one's.

    Attributes:
        distance: |logits - logits'| / |logits| in the 2-norm after the prompt, both with the first one's routing.
        bound: of that distance, from the roundings of two bf16 runs of a model this deep.
        equal_tokens: greedy tokens until the first difference, each going on with its own, summed over the sequences.
        equal_choices: greedy tokens that are equal where both were fed the same ones.
        tokens: how many there were to compare.
    """

    distance: float
    bound: float
    equal_tokens: int
    equal_choices: int
    tokens: int


@dataclass
class Point:
    """One implementation with one number of sequences.

    Attributes:
        status: "ok", "wrong" (logits outside the bound, so there are no times) or "failed" (it raised).
        reason: a sentence, for every status but "ok".
        agreement: with the first implementation; None for itself.
    """

    batch: int
    implementation: str
    status: str = OK
    reason: str | None = None
    agreement: Agreement | None = None
    phases: list[Phase] = field(default_factory=list)


@dataclass
class Released:
    """Memory of a process of its own that loads the model and packs it, giving each layer's dense weights up in turn.

    Attributes:
        before: held before loading: interpreter, torch, transformers.
        load, pack, run: peaks while the model was loaded (or made), packed, and while the largest batch ran.
        after: held at the end.
        separate: whether resident peaks were counted separately; if not, each includes those before it.
        taken, left: layers packed, and layers left to the reference path.
    """

    before: Bytes
    load: Bytes
    pack: Bytes
    run: Bytes
    after: Bytes
    separate: bool
    taken: int
    left: int


@dataclass
class EndToEndReport(SavedReport):
    """Everything measured.

    Attributes:
        environment: as `moe_cpu.benchmark.environment.describe` has it, and the version of transformers.
        settings: `Settings` as a dictionary.
        model: `needs.Sizes` as a dictionary.
        planned: `needs.Needs` as a dictionary.
        released: None when moe_cpu does not take part, or when the process failed; a note says so.
        both_layouts: the most bytes resident while implementations took turns, with dense and packed weights side by side and pages of a mapped checkpoint.
        points: by batch, then by implementation.
        notes: sentences a reader should know.
    """

    kind: ClassVar[str] = "end_to_end"
    caption: ClassVar[tuple[str, ...]] = (*SavedReport.caption, "transformers")

    environment: dict[str, Any]
    settings: dict[str, Any]
    model: dict[str, Any]
    planned: dict[str, Any]
    released: Released | None = None
    both_layouts: int | None = None
    points: list[Point] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every implementation ran, within the bound of the first, and memory was measured where it was to be."""
        missing = self.released is None and "moe_cpu" in self.settings["implementations"]
        return not missing and not any(point.status in (WRONG, FAILED) for point in self.points)

    @classmethod
    def parts(cls, data: dict[str, Any]) -> dict[str, Any]:
        released = None if data["released"] is None else released_from(data["released"])
        return {**data, "released": released, "points": [_point(point) for point in data["points"]]}


def released_from(data: dict[str, Any]) -> Released:
    """`Released` from its JSON form."""
    read: dict[str, Any] = {name: Bytes(*v) if isinstance(v, list) else v for name, v in data.items()}
    return Released(**read)


def _made(kind: Any, data: dict[str, Any] | None) -> Any:
    return None if data is None else kind(**data)


def _point(data: dict[str, Any]) -> Point:
    phases = [_phase(phase) for phase in data["phases"]]
    return Point(**{**data, "agreement": _made(Agreement, data["agreement"]), "phases": phases})


def _phase(data: dict[str, Any]) -> Phase:
    comparisons = {name: _made(Comparison, data[name]) for name in ("whole_comparison", "experts_comparison")}
    times = {name: Times(**data[name]) for name in ("whole", "experts")}
    return Phase(**{**data, **times, **comparisons})
